"""Configuration: its schema, the limits of its values, and the strict parser. Imports no torch."""

from andrea.config.checks import MOST_SAMPLED_TOKENS
from andrea.config.errors import UserError
from andrea.config.fingerprint import digest, recipe_fingerprint, recipe_values
from andrea.config.group_files import CONFIGS, chosen_groups, group_config, group_values
from andrea.config.keys import lay_over, nearest, with_current_keys, with_missing_keys
from andrea.config.limits import LARGEST_INTEGER, PathText, Text, folder_name, readable_path
from andrea.config.parse import as_typed, parse, to_plain
from andrea.config.schema import (
    AttentionConfig,
    AverageConfig,
    CompareConfig,
    ConsolidateConfig,
    DashboardConfig,
    DataConfig,
    ExportConfig,
    HealthConfig,
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

__all__ = [
    "CONFIGS",
    "LARGEST_INTEGER",
    "MOST_SAMPLED_TOKENS",
    "AttentionConfig",
    "CompareConfig",
    "AverageConfig",
    "ConsolidateConfig",
    "DashboardConfig",
    "DataConfig",
    "ExportConfig",
    "HealthConfig",
    "LensConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PathText",
    "RunConfig",
    "RunsConfig",
    "SampleConfig",
    "SourceConfig",
    "Text",
    "TokenizerConfig",
    "TrainConfig",
    "UserError",
    "as_typed",
    "chosen_groups",
    "digest",
    "folder_name",
    "group_config",
    "group_values",
    "lay_over",
    "nearest",
    "parse",
    "readable_path",
    "recipe_fingerprint",
    "recipe_values",
    "to_plain",
    "with_current_keys",
    "with_missing_keys",
]
