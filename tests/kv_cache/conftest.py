import inspect

import pytest

from cute_kernels import attention, kv_cache
from tests.kv_cache import standins


@pytest.fixture(autouse=True, scope="session")
def operators():
    """Stand-ins for what this checkout does not have yet."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(kv_cache, "append_kv"):
            patch.setattr(kv_cache, "append_kv", standins.append_kv, raising=False)
        if "block_table" not in inspect.signature(attention.decode_attention).parameters:
            patch.setattr(attention, "decode_attention", standins.decode_attention)
        yield
