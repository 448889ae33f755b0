"""What the tests of the KV-aware router share: engines, prompts, and a router that serves."""

from slimerl.rollout.kv_fleet import EngineModel
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import Query
from slimerl.samples.messages import EngineInfo

MODEL = EngineModel(slots=16, kv_tokens=64_000)


def engine(number: int) -> EngineInfo:
    return EngineInfo(f"e{number}", f"http://e{number}", "key", 1)


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    """Tokens of one prompt; another seed shares no block with it."""
    return tuple(seed * 100_003 + position for position in range(tokens))


def serving(engines: int, capacity: int = 1000, model: EngineModel = MODEL, **options: object) -> KvRouter:
    router = KvRouter(capacity, model=model, **options)  # type: ignore[arg-type]
    for number in range(engines):
        router.join(engine(number))
    router.release(0, [f"e{number}" for number in range(engines)], {})
    return router


def send(router: KvRouter, session: str, group: str = "", tokens: tuple[int, ...] | None = None, new: int = 256):  # type: ignore[no-untyped-def]
    """Route and reserve."""
    query = Query(session, group, tokens, new)
    engine_id = router.route(query)
    assert engine_id is not None
    return router.reserve(engine_id, query)
