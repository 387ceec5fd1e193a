"""How many tokens a request has, and how many it may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.estimate import (
    FIRST_GUESS,
    LEAST_RATIO,
    MOST_RATIO,
    Window,
    corrected,
    counted,
    size_of,
    surely,
    tokens_of,
)

sizes = st.integers(1, 10**7)


@given(st.integers(64, 10**7), st.integers(1, 10**6))
def test_a_request_leaves_room_for_the_answer_and_is_cut_well_below(tokens: int, answer: int) -> None:
    window = Window(tokens, answer)
    assert window.high <= 0.9 * tokens
    assert window.low < window.high
    assert tokens - window.high >= min(answer, tokens // 4)


@given(st.integers(64, 10**6), st.integers(1, 10**5), st.integers(0, 10**6))
def test_an_answer_fits_beside_its_request(tokens: int, answer: int, request: int) -> None:
    most = Window(tokens, answer).answer_beside(request)
    if most is None:
        assert request + answer <= tokens
    else:
        assert 16 <= most <= max(16, tokens - request)


@given(sizes, st.integers(-(2**63), 2**64))
def test_what_a_server_counts_is_made_believable(size: int, tokens: int) -> None:
    count = counted(size, tokens)
    assert count.tokens >= 1
    assert corrected(FIRST_GUESS, count) <= MOST_RATIO
    assert corrected(FIRST_GUESS, count) >= LEAST_RATIO


def test_more_tokens_than_thought_count_at_once_fewer_little_by_little() -> None:
    assert corrected(0.3, counted(1000, 600)) == 0.6
    ratio = 0.6
    for _ in range(40):
        ratio = corrected(ratio, counted(1000, 250))
        assert ratio >= 0.25
    assert ratio < 0.26


def test_what_is_new_is_guessed_with_the_first_guess_at_least() -> None:
    last = counted(9000, 1800)
    assert tokens_of(12_000, 0.2, last) == 1800 + 1000 + 1
    assert tokens_of(6000, 0.2, last) == 1201, "a shorter request does not begin with the last one"
    assert size_of(100, 0.25) == 400


def test_a_request_is_surely_too_long_only_with_much_to_spare() -> None:
    assert surely(FIRST_GUESS) == 1 / 8
    assert surely(0.5) == 0.4
