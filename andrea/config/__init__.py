"""Configuration: its schema, the limits of its values, and the strict parser. Imports no torch."""

from andrea.config.checks import LARGEST_VOCABULARY, MOST_SAMPLED_TOKENS
from andrea.config.keys import (
    CONFIGS,
    digest,
    group_values,
    lay_over,
    nearest,
    recipe_fingerprint,
    recipe_values,
    with_current_keys,
)
from andrea.config.parse import as_typed, group_config, parse, to_plain
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
    UserError,
    folder_name,
    readable_path,
)
