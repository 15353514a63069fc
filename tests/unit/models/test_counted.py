"""How many responses are complete, as told by the progress bar that vLLM asks for."""

from __future__ import annotations

from tango_hpc.models.engine.counted import CountedResponses


def test_the_bar_of_responses_tells_and_that_of_prompts_does_not() -> None:
    """vLLM makes both with what it is given: one goes through the prompts, the other is told of responses."""
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    prompts = CountedResponses(range(3), desc="Rendering prompts", mininterval=0, miniters=1, tell=tell)
    assert list(prompts) == [0, 1, 2] and not told
    responses = CountedResponses(total=5, desc="Processed prompts", dynamic_ncols=True, tell=tell)
    for number in (2, 1):
        responses.update(number)
    assert responses.format_dict["elapsed"] > 0
    responses.close()
    assert told == [(2, 5), (3, 5)]
