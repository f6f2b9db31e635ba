"""What pyproject.toml cannot express: the folder configs/ of the repository is installed as andrea/configs."""

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["andrea", "andrea.*"], exclude=["*.__pycache__", "*.__pycache__.*"])
groups = [f"andrea.configs.{group}" for group in find_namespace_packages("configs")]
setup(packages=[*packages, "andrea.configs", *groups], package_dir={"andrea.configs": "configs"})
