"""Where in a completion its final answer stands."""


def final_answer(completion: str, answer_after: str | None) -> str | None:
    """Return the text after the last marker, stripped; the whole completion without a marker.

    None if the marker is missing from the completion.
    """
    if answer_after is None:
        return completion.strip()
    _, marker, answer = completion.rpartition(answer_after)
    return answer.strip() if marker else None
