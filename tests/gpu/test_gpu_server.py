"""The server before an engine on a GPU: it starts, streams, and tells its metrics."""

from __future__ import annotations

import pytest

from tests.gpu.served_cases import check_answers, serving

pytestmark = pytest.mark.gpu


def test_an_answer_is_streamed_and_counted() -> None:
    with serving("cuda") as client:
        check_answers(client)
