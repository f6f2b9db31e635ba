"""Ships configs/ as andrea/configs: a step of setuptools, named in pyproject.toml. Nothing else imports this file."""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install reads the checkout's own
            shutil.copytree("configs", Path(self.build_lib, "andrea", "configs"), dirs_exist_ok=True)

    def get_source_files(self) -> list[str]:
        """What the sdist holds."""
        return [*super().get_source_files(), *(str(path) for path in Path("configs").rglob("*") if path.is_file())]
