"""Weight formats that the package does not know, each in a file: importing this folder registers all of them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("test_"):
        importlib.import_module(f"{__name__}.{_module.name}")
