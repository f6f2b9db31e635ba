"""Ships configs/ as andrea/configs. All else about the package is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install reads the checkout's own
            shutil.copytree("configs", Path(self.build_lib, "andrea", "configs"), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithConfigs})
