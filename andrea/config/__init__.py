"""Configuration: its schema, the limits of its values, and the strict parser. Imports no torch."""

from andrea.config.checks import LARGEST_VOCABULARY, MOST_SAMPLED_TOKENS
from andrea.config.fingerprint import digest, recipe_fingerprint, recipe_values
from andrea.config.keys import (
    CONFIGS,
    chosen_groups,
    group_values,
    lay_over,
    nearest,
    settings_of_runs,
    with_current_keys,
)
from andrea.config.parse import as_typed, check_combinations, group_config, parse, parse_values, to_plain
from andrea.config.schema import (
    LARGEST_INTEGER,
    MEASURES_HEADS,
    ON_LARGE_TEXT,
    AttentionConfig,
    CompareConfig,
    ConsolidateConfig,
    DashboardConfig,
    DataConfig,
    EvaluateConfig,
    ExportConfig,
    HealthConfig,
    ImportConfig,
    LensConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PathText,
    RunConfig,
    RunsConfig,
    SampleConfig,
    ServeConfig,
    SourceConfig,
    Text,
    TokenizerConfig,
    TrainConfig,
    UserError,
    folder_name,
    readable_path,
)
