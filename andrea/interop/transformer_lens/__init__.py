"""TransformerLens as another program: it reads exported folders, and needs an adapter for the code that is exported along."""
