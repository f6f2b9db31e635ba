"""Configuration: its schema, the limits of its values, and the strict parser. Imports no torch."""

from andrea.config.checks import LARGEST_VOCABULARY, MOST_SAMPLED_TOKENS
from andrea.config.fingerprint import digest, recipe_fingerprint, recipe_values
from andrea.config.group_files import CONFIGS, chosen_groups, group_config, group_values, settings_of_runs
from andrea.config.keys import lay_over, nearest, with_current_keys
from andrea.config.limits import LARGEST_INTEGER, PathText, Text, UserError, folder_name, readable_path
from andrea.config.parse import as_typed, check_combinations, parse, parse_values, to_plain
from andrea.config.schema import (
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
    RunConfig,
    RunsConfig,
    SampleConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
