"""Many ranks: joining, sharing the model, the watchdog, saving."""
