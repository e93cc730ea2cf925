"""Order, chunk size, victim: the scheduler's decisions as pure functions."""

from collections.abc import Sequence

from jaxserve.request import Request


def queue_key(policy: str, request: Request) -> tuple[float, ...]:
    """Order in the waiting queue; does not change while the request waits."""
    if policy == "priority":
        return (request.priority, request.number)
    if policy == "shortest_first":
        return (len(request.tokens), request.number)
    if policy == "round_robin":
        return (request.last_step, request.number)
    if policy == "deadline":
        return (request.due, request.number)
    return (request.number,)


def order_key(policy: str, request: Request, step: int, aging_steps: int) -> tuple[float, ...]:
    """Order among partial prefills and the head of the queue; the least goes first.

    Aging: whoever got no tokens for `aging_steps` steps goes before everybody who got some since,
    the longest-waiting first.
    """
    if step - request.last_step >= aging_steps:
        return (0, request.last_step, request.number)
    if policy == "priority":
        return (1, request.priority, request.number)
    if policy == "shortest_first":
        return (1, request.num_pending, request.number)
    if policy == "round_robin":
        return (1, request.last_step, request.number)
    if policy == "deadline":
        return (1, request.due, request.number)
    return (1, request.number)


def canonical_chunk(pending: int, chunk_size: int, left: int) -> int:
    """A whole chunk or nothing: chunk borders are multiples of `chunk_size` from position 0."""
    size = min(pending, chunk_size)
    return size if size <= left else 0


def long_share(left: int, long_pending: int, has_short: bool) -> int:
    """Tokens kept for long prefills: half of what the decodes leave while short prompts compete.

    So a long prompt takes at most twice the steps it needs alone, and short ones always move.
    """
    return min(long_pending, (left + 1) // 2) if has_short else 0


def reserve_tokens(request: Request, block_size: int, whole: bool) -> int:
    """Tokens whose blocks are promised at admission; `whole`: to the request's last token.

    The first time: the prompt and one step of decoding.  After a preemption: as much again as it
    has put out, at least a block.  Only a request beyond its promise is preempted, so the output at
    least doubles between two preemptions: at most 2 + log2(max_tokens / block_size) of them.
    """
    if whole:
        return request.max_kv
    known = len(request.tokens)
    room = max(block_size, known - request.num_prompt) if request.num_preempted else 1
    return min(request.max_kv, known + room)


def victim(candidates: Sequence[Request]) -> Request:
    """Who loses its blocks: of the least important, the one that would hold them longest for the
    fewest tokens of recomputation; of equals the youngest."""

    def cost(request: Request) -> tuple[float, ...]:
        remaining = request.max_kv - request.num_computed
        return (-request.priority, request.num_computed / (1 + remaining), -request.number)

    return min(candidates, key=cost)
