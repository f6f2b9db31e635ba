"""Hostile inputs for the package's borders. Each input must be accepted, or refused with a UserError.

Anything else is a finding: another exception, too much time for one input, too much memory (the limits are in trial.py).
`tests/system/test_fuzz.py` tries a few hundred inputs for each border, `bench/fuzz.py` a hundred thousand.
"""

from __future__ import annotations

from fuzzing.checkpoints import checkpoints, make_checkpoints
from fuzzing.configuration import configurations, make_configurations
from fuzzing.imports import imports, make_imports
from fuzzing.prompts import make_prompts, prompts
from fuzzing.records import make_records, records
from fuzzing.resumes import make_commands, make_resumes, resumes
from fuzzing.token_shards import make_shards, shards
from fuzzing.tokenizer_files import make_tokenizers, tokenizers
from fuzzing.trial import Target

TARGETS = {
    "configuration": Target(configurations, make_configurations),
    "token shards": Target(shards, make_shards),
    "checkpoints": Target(checkpoints, make_checkpoints),
    "resumes": Target(resumes, make_resumes),
    "records": Target(records, make_records),
    "commands": Target(resumes, make_commands, waiting_s=600.0),  # it may first write a sample of 65,536 tokens
    "tokenizer files": Target(tokenizers, make_tokenizers),
    "prompts": Target(prompts, make_prompts),
    "imports": Target(imports, make_imports, waiting_s=60.0),
}
