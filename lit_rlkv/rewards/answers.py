"""Where in a completion its final answer stands."""


def final_answer(completion: str, answer_after: str | None) -> str | None:
    """What follows the last marker, stripped; all of the completion if there is no marker to look for.

    None if the marker is missing from the completion.
    """
    if answer_after is None:
        return completion.strip()
    _, marker, answer = completion.rpartition(answer_after)
    return answer.strip() if marker else None
