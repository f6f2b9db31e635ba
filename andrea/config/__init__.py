"""Configuration: what a user may set (schema), within which limits, read by one strict parse. Imports no torch."""

from andrea.config.checks import MOST_SAMPLED_TOKENS
from andrea.config.errors import UserError
from andrea.config.limits import LARGEST_INTEGER, PathText, Text, folder_name, readable_path
from andrea.config.parse import convert, nearest, parse, to_plain
from andrea.config.renamed import current_key, with_current_keys
from andrea.config.schema import (
    AttentionConfig,
    CompareConfig,
    ConsolidateConfig,
    DashboardConfig,
    DataConfig,
    HealthConfig,
    LensConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SampleConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "LARGEST_INTEGER",
    "MOST_SAMPLED_TOKENS",
    "AttentionConfig",
    "CompareConfig",
    "ConsolidateConfig",
    "DashboardConfig",
    "DataConfig",
    "HealthConfig",
    "LensConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PathText",
    "RunConfig",
    "SampleConfig",
    "SourceConfig",
    "Text",
    "TokenizerConfig",
    "TrainConfig",
    "UserError",
    "convert",
    "current_key",
    "folder_name",
    "nearest",
    "parse",
    "readable_path",
    "to_plain",
    "with_current_keys",
]
