"""The router that the spec names is the one that the rollout role has."""

import pytest
from engine_fixtures import engine_spec

from slimerl.rollout.__main__ import build_router
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import LeastLoaded


@pytest.mark.parametrize(("chosen", "kind"), [({}, KvRouter), ({"router": "least_loaded"}, LeastLoaded)])
def test_it_is_kv_aware_unless_the_spec_says_otherwise(tmp_path, chosen, kind):
    spec = engine_spec(tmp_path, tmp_path)
    rollout = type(spec.rollout)(**chosen)
    assert type(build_router(spec.model_copy(update={"rollout": rollout}))) is kind
