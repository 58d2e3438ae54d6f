"""Tables of docs/results/ranking.md."""

from collections.abc import Mapping
from statistics import fmean, geometric_mean

from pretrained_parts.tables import small
from ranking_parts.measure import EDGES
from ranking_parts.results import FIRST, PARTS, Group, Results, difference, plain_at, prompts_needed
from ranking_parts.setting import ALL, COMPUTE, DTYPES, INTERVAL
from ranking_parts.texts import RECALLS

from lit_rlkv.kernels.quantization import group_of, quantized_bytes, record_bytes
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.reporting.tables import markdown_table

NAMES = {None: "16 bit", "int8": "int8", "int4": "int4"}
MISSING = "–"
HEAD_DIMS = (64, 128, 256)


def report(results: Results) -> str:
    """Return all tables under their titles."""
    parts = []
    for slots in results.sizes:
        parts += [f"## Bytes of {slots} slots in 16 bit", ranking(results, slots)]
        parts += ["### Along the response", along(results, slots)]
    parts += ["## Bytes", sizes(results), "## Dtypes", dtypes(results)]
    parts += [
        "## Prompts",
        prompts(results),
        "## Share of a row from which a dtype holds more keys",
        shares(),
    ]
    return "\n\n".join(parts)


def recalls(group: Group) -> str:
    """Return the values recalled right, `asked · later · own`."""
    return " · ".join(f"{right}/{n}" for right, n in map(group.recalled, RECALLS))


def interval(group: Group) -> str:
    """Return the KL with its interval."""
    found = group.kl
    return f"{small(found.value)} ({small(found.low)}–{small(found.high)})"


def ranking(results: Results, slots: int) -> str:
    """Return KL, overlap and recall by policy and dtype, lowest first in the dtypes that all have."""
    places = {dtype: results.groups(dtype, slots) for dtype in DTYPES}
    found = [policy for policy in UNTRAINED if any(policy in groups for groups in places.values())]
    shared = [groups for groups in places.values() if set(groups) == set(found)] or list(places.values())

    def cost(policy: str) -> float:
        return geometric_mean([groups[policy].kl.value for groups in shared if policy in groups] or [1.0])

    headings = ["policy"]
    for name in NAMES.values():
        headings += [f"{name}: KL", "p05", "recalled"]
    body = [_line(None, {dtype: results.dense(dtype) for dtype in DTYPES})]
    body += [
        _line(policy, {d: groups.get(policy) for d, groups in places.items()})
        for policy in sorted(found, key=cost)
    ]
    return markdown_table(headings, body)


def _line(policy: str | None, groups: dict[str | None, Group | None]) -> list[str]:
    cells = ["all keys" if policy is None else f"`{policy}`"]
    for group in groups.values():
        cells += [interval(group), f"{group.overlap_p05:.2f}", recalls(group)] if group else [MISSING] * 3
    return cells


def along(results: Results, slots: int) -> str:
    """Return KL and the 5th percentile of the overlap by response token, in 16 bit."""
    ends = [*EDGES[1:], None]
    labels = [f"{a}–{b - 1}" if b else f"{a}+" for a, b in zip(EDGES, ends, strict=True)]
    body = []
    for policy, group in results.groups(None, slots).items():
        pairs = zip(group.along("kl"), group.along("p05"), strict=True)
        body.append([f"`{policy}`", *(f"{small(kl)} / {p05:.2f}" for kl, p05 in pairs)])
    return markdown_table(["policy", *labels], body)


def sizes(results: Results) -> str:
    """Return keys and bytes of a row by size and dtype, and the bytes that policies keep beside slots."""
    body = []
    for slots in results.sizes:
        for dtype in DTYPES:
            if groups := results.groups(dtype, slots):
                beside = [group.n_bytes("beside") for group in groups.values()]
                one = next(iter(groups.values()))
                cells = [one.n_bytes("slots"), one.n_bytes("record"), min(beside), max(beside)]
                kib = [f"{n / 1024:,.0f}" for n in cells]
                keys = f"{one.rows[0]['budget']} + {INTERVAL}"
                body.append([str(slots), NAMES[dtype], keys, *kib[:2], f"{kib[2]}–{kib[3]}"])
    return markdown_table(["slots in 16 bit", "dtype", "keys", "slots, KiB", "record", "beside"], body)


def dtypes(results: Results) -> str:
    """Return how often a dtype has a lower KL than 16 bit at equal bytes, and by how much; and more slots."""
    body = []
    for slots in results.sizes:
        if slots > (least := results.sizes[0]):
            fewer = {policy: group.by_prompt for policy, group in results.groups(None, least).items()}
            line = [str(slots), NAMES[None], f"none: beside {least} slots"]
            body.append([*line, *_compared(results.groups(None, slots), fewer)])
        for dtype in DTYPES[1:]:
            groups = results.groups(dtype, slots)
            plain = {policy: group.by_prompt for policy, group in results.groups(None, slots).items()}
            body.append([str(slots), NAMES[dtype], "slots", *_compared(groups, plain)])
            equal = {
                policy: plain_at(results, policy, each.n_bytes(*PARTS)) for policy, each in groups.items()
            }
            body.append([str(slots), NAMES[dtype], "slots, record and the rest", *_compared(groups, equal)])
            groups = results.groups(dtype, slots, ALL)
            body.append([str(slots), NAMES[dtype], "the same, measured", *_compared(groups, plain)])
    headings = ["slots in 16 bit", "dtype", "equal bytes of", "keys", "lower KL than 16 bit in", "surely"]
    return markdown_table([*headings, "KL / KL in 16 bit"], [line for line in body if line[-1]])


def options(results: Results, without: Results) -> str:
    """Return KL and recall of policies with an option, beside those without."""
    body = []
    for slots in results.sizes:
        for dtype in DTYPES:
            plain = without.groups(dtype, slots)
            for policy, group in results.groups(dtype, slots).items():
                other = plain[policy.partition(" ")[0]]
                told = difference(group.by_prompt, other.by_prompt)
                less = f"{small(told.value)} ({small(told.low)}–{small(told.high)})"
                cells = [interval(group), less, recalls(group), recalls(other)]
                body.append([str(slots), NAMES[dtype], f"`{policy}`", *cells])
    headings = ["KL", "KL without − with it", "recalled", "recalled without"]
    return markdown_table(["slots in 16 bit", "dtype", "policy and option", *headings], body)


def _compared(groups: Mapping[str, Group], plain: Mapping[str, list[float] | None]) -> list[str]:
    """Return keys, policies with a lower KL, those beyond the error of the prompts, and the mean ratio."""
    pairs = [(group, kl) for policy, group in groups.items() if (kl := plain.get(policy))]
    if not pairs:
        return [""]
    ratios = [group.kl.value / fmean(kl) for group, kl in pairs]
    n_sure = sum(difference(group.by_prompt, kl).low > 0 for group, kl in pairs)
    n_lower = sum(ratio < 1 for ratio in ratios)
    keys = str(pairs[0][0].rows[0]["budget"])
    return [keys, f"{n_lower} of {len(pairs)}", str(n_sure), f"{geometric_mean(ratios):.2f}"]


def shares() -> str:
    """Return which share of a row's tokens a head in 16 bit must hold before other dtypes hold more keys.

    In the same bytes of slots and record: record / (bytes of a key in 16 bit − of its codes).
    """
    body = []
    for dim in HEAD_DIMS:
        cells = [str(dim)]
        for dtype in DTYPES[1:]:
            record = record_bytes(dim, dtype, group_of(dtype, COMPUTE))
            saved = quantized_bytes(dim, None, COMPUTE) - quantized_bytes(dim, dtype, COMPUTE)
            cells.append(f"{100 * record / saved:.1f} %")
        body.append(cells)
    return markdown_table(["dimensions of a head", *(NAMES[dtype] for dtype in DTYPES[1:])], body)


def prompts(results: Results) -> str:
    """Return the first policies beside the middle one, with the prompts that tell them apart."""
    body = []
    for slots, dtype in results.places:
        groups = results.groups(dtype, slots)
        policies = list(groups)
        middle = policies[len(policies) // 2]
        for policy in policies[:FIRST]:
            kls = groups[policy].by_prompt, groups[middle].by_prompt
            found, n = difference(*kls), prompts_needed(*kls)
            told = f"{small(found.value)} ({small(found.low)}–{small(found.high)})"
            body.append([str(slots), NAMES[dtype], f"`{policy}`", f"`{middle}`", told, str(n or MISSING)])
    return markdown_table(
        ["slots in 16 bit", "dtype", "policy", "middle", "KL of the middle − its KL", "prompts"], body
    )
