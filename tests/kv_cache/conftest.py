import pytest

from tests.kv_cache import standins


@pytest.fixture(autouse=True, scope="session")
def operators():
    """`append_kv` and `decode_attention`, or stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        standins.install(patch)
        yield
