"""Shadow attention in Triton, forward and backward.

    out[q] = Σ_k p[q, k] v[k],  p[q, k] = exp(s[q, k] - lse[q]),  s[q, k] = q·k scaling,
    over the keys k <= q < evicted_at[k]
    ds[q, k] = p[q, k] (d_out[q]·v[k] - delta[q]),  delta[q] = d_out[q]·out[q] - d_lse[q]
    dq[q] = scaling Σ_k ds[q, k] k,  dk[k] = scaling Σ_q ds[q, k] q,  dv[k] = Σ_q p[q, k] d_out[q]

Listed mode: `_table` writes, for every block of queries, the keys cached in it. `_forward` and
`_query_gradients` read a dense list and gather tiles of keys by it. `_key_gradients`
reads the keys by slot: a program owns a tile of slots and goes through the blocks with the gradients of the
slots' keys in registers. Where a slot gets a new key, the finished row is stored and the next starts from 0.
Contiguous mode: the same without tables, in the order of position up to the diagonal. Both modes are exact,
because they test every pair of query and key, but for the start of a list: keys that all queries of the block
see.

An entry of a table is `key << 8 | left`, where `left` counts the queries of the block before the key's
eviction; 0 is an empty entry.

Axis 0 of every grid is the heads of all sequences, because CUDA limits the other two to 65,535.
"""

from typing import no_type_check

import triton
import triton.language as tl

from lit_rlkv.kernels.triton_functions import tanh

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def _table(
    evicted_at, slot_of, table, n_listed, seq, n_slots,
    BLOCK: tl.constexpr, PLACED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the table of one block of queries: by slot if PLACED, otherwise a list and its two lengths.

    First in the list are the keys that all queries of the block see, then the others; both by position.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = block * BLOCK
    evicted_at += row * seq
    table += (row * tl.num_programs(1) + block) * n_slots
    n_whole, n_other = 0, 0
    if not PLACED:
        for start in range(0, first, CHUNK):
            keys = start + tl.arange(0, CHUNK)
            evictions = tl.load(evicted_at + keys, mask=keys < first, other=0)
            n_other += tl.sum((evictions >= first + BLOCK).to(tl.int32), 0)
    end_of_whole = n_other
    for start in range(0, tl.minimum(first + BLOCK, seq), CHUNK):
        keys = start + tl.arange(0, CHUNK)
        evictions = tl.load(evicted_at + keys, mask=keys < tl.minimum(first + BLOCK, seq), other=0)
        is_living = evictions > tl.maximum(keys, first)
        if PLACED:
            place = tl.load(slot_of + row * seq + keys, mask=is_living, other=0)
        else:
            is_whole = (keys < first) & (evictions >= first + BLOCK)
            whole, other = is_whole.to(tl.int32), (is_living & ~is_whole).to(tl.int32)
            place = tl.where(is_whole, n_whole + tl.cumsum(whole, 0), n_other + tl.cumsum(other, 0)) - 1
            n_whole += tl.sum(whole, 0)
            n_other += tl.sum(other, 0)
        entry = (keys << 8) | tl.minimum(evictions - first, BLOCK)
        # A plan of another eviction table must not write elsewhere.
        tl.store(table + place, entry, mask=is_living & (place < n_slots))
    if not PLACED:
        n_listed += 2 * (row * tl.num_programs(1) + block)
        tl.store(n_listed, tl.minimum(n_other, n_slots))
        tl.store(n_listed + 1, tl.minimum(end_of_whole, n_slots))


@triton.jit
@no_type_check
def _rows(matrix, rows, is_row, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load [rows, WIDTH] of a matrix [.., DIM]; 0 beyond it."""
    columns = tl.arange(0, WIDTH)
    is_value = is_row[:, None]
    if DIM < WIDTH:
        is_value = is_value & (columns < DIM)[None, :]
    return tl.load(matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=is_value, other=0.0)


@triton.jit
@no_type_check
def _store_rows(matrix, rows, is_row, stride, values, DIM: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    is_value = is_row[:, None]
    if DIM < WIDTH:
        is_value = is_value & (columns < DIM)[None, :]
    place = matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(place, values.to(matrix.dtype.element_ty), mask=is_value)


@triton.jit
@no_type_check
def _tile_of_keys(table, evicted_at, places, n_places, first, LISTED: tl.constexpr):
    """Return the keys at these places, their evictions, and a mask of the places that have a key."""
    if LISTED:
        entry = tl.load(table + places, mask=places < n_places, other=0)
        left = entry & 255
        return entry >> 8, first + left, left > 0
    is_key = places < n_places
    return places, tl.load(evicted_at + places, mask=is_key, other=0), is_key


@triton.jit
@no_type_check
def _base2(products, inner, outer, CAPPED: tl.constexpr):
    """Return logits in base 2."""
    if CAPPED:
        return outer * tanh(products * inner)
    return outer * products


@triton.jit
@no_type_check
def _list_of(
    n_listed, row, first, seq, n_slots,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return where the list of keys for the block of query `first` starts in the table, and two lengths.

    The lengths are those of the list, and of its start that all queries of the block see.
    """
    if LISTED:
        block = row * tl.cdiv(seq, BLOCK) + first // BLOCK
        return block * n_slots, tl.load(n_listed + 2 * block), tl.load(n_listed + 2 * block + 1)
    else:  # not below the branch: Triton 3.6 compares the types of every return that it reads
        return 0, tl.minimum(first + QUERIES, seq), 0


@triton.jit
@no_type_check
def _forward(
    query, key, value, evicted_at, table, n_listed, out, lse,
    query_b, query_h, query_s, key_b, key_h, key_s, value_b, value_h, value_s,
    n_heads, n_tables, seq, n_slots, inner, outer,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    batch, head = (tl.program_id(0) // n_heads).to(tl.int64), (tl.program_id(0) % n_heads).to(tl.int64)
    row = batch * n_tables + (head // GROUP) % n_tables
    queries = first + tl.arange(0, QUERIES)
    q = _rows(query + batch * query_b + head * query_h, queries, queries < seq, query_s, DIM, WIDTH)
    key += batch * key_b + head // GROUP * key_h
    value += batch * value_b + head // GROUP * value_h
    list_start, n_places, n_whole = _list_of(n_listed, row, first, seq, n_slots, BLOCK, QUERIES, LISTED)
    if LISTED:  # Triton 3.6 returns no None from a function, which the table then is
        table += list_start
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, WIDTH_V], tl.float32)
    for start in range(0, n_places, KEYS):
        places = start + tl.arange(0, KEYS)
        keys, evictions, is_key = _tile_of_keys(
            table, evicted_at + row * seq, places, n_places, first // BLOCK * BLOCK, LISTED
        )
        k = _rows(key, keys, is_key, key_s, DIM, WIDTH)
        logits = _base2(tl.dot(q, tl.trans(k), input_precision=PRECISION), inner, outer, CAPPED)
        if start + KEYS > n_whole:
            is_visible = (keys[None, :] <= queries[:, None]) & (queries[:, None] < evictions[None, :])
            logits = tl.where(is_visible, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        # Without a visible key so far, any finite number in place of -inf gives exp2(-inf) = 0.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - level[:, None])
        fading = tl.exp2(top - level)
        total = total * fading + tl.sum(weights, 1)
        v = _rows(value, keys, is_key, value_s, DIM_V, WIDTH_V)
        mean = tl.dot(weights.to(v.dtype), v, mean * fading[:, None], input_precision=PRECISION)
        top = higher
    total = tl.where(total > 0, total, 1.0)
    out += (batch * seq * n_heads + head) * DIM_V
    _store_rows(out, queries, queries < seq, n_heads * DIM_V, mean / total[:, None], DIM_V, WIDTH_V)
    tl.store(lse + (batch * n_heads + head) * seq + queries, top + tl.log2(total), mask=queries < seq)


@triton.jit
@no_type_check
def _query_gradients(
    query, key, value, d_out, lse, delta, evicted_at, table, n_listed, d_query,
    query_b, query_h, query_s, key_b, key_h, key_s, value_b, value_h, value_s, d_out_b, d_out_h, d_out_s,
    n_heads, n_tables, seq, n_slots, scaling, inner, outer,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    batch, head = (tl.program_id(0) // n_heads).to(tl.int64), (tl.program_id(0) % n_heads).to(tl.int64)
    row = batch * n_tables + (head // GROUP) % n_tables
    queries = first + tl.arange(0, QUERIES)
    is_query = queries < seq
    q = _rows(query + batch * query_b + head * query_h, queries, is_query, query_s, DIM, WIDTH)
    d_o = _rows(d_out + batch * d_out_b + head * d_out_h, queries, is_query, d_out_s, DIM_V, WIDTH_V)
    at = (batch * n_heads + head) * seq + queries
    level = tl.load(lse + at, mask=is_query, other=float("inf"))
    shift = tl.load(delta + at, mask=is_query, other=0.0)
    key += batch * key_b + head // GROUP * key_h
    value += batch * value_b + head // GROUP * value_h
    list_start, n_places, n_whole = _list_of(n_listed, row, first, seq, n_slots, BLOCK, QUERIES, LISTED)
    if LISTED:  # Triton 3.6 returns no None from a function, which the table then is
        table += list_start
    d_q = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, n_places, KEYS):
        places = start + tl.arange(0, KEYS)
        keys, evictions, is_key = _tile_of_keys(
            table, evicted_at + row * seq, places, n_places, first // BLOCK * BLOCK, LISTED
        )
        k = _rows(key, keys, is_key, key_s, DIM, WIDTH)
        v = _rows(value, keys, is_key, value_s, DIM_V, WIDTH_V)
        logits = _base2(tl.dot(q, tl.trans(k), input_precision=PRECISION), inner, outer, CAPPED)
        weights = tl.exp2(logits - level[:, None])
        if start + KEYS > n_whole:
            is_visible = (keys[None, :] <= queries[:, None]) & (queries[:, None] < evictions[None, :])
            weights = tl.where(is_visible, weights, 0.0)
        d_weights = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
        d_logits = weights * (d_weights - shift[:, None])
        if CAPPED:
            d_logits = d_logits * (1.0 - (logits / outer) * (logits / outer))
        d_q = tl.dot(d_logits.to(k.dtype), k, d_q, input_precision=PRECISION)
    d_query += (batch * seq * n_heads + head) * DIM
    _store_rows(d_query, queries, is_query, n_heads * DIM, d_q * scaling, DIM, WIDTH)


@triton.jit
@no_type_check
def _key_gradients(
    query, key, value, d_out, lse, delta, evicted_at, table, d_key, d_value,
    query_b, query_h, query_s, key_b, key_h, key_s, value_b, value_h, value_s, d_out_b, d_out_h, d_out_s,
    n_heads, n_tables, seq, n_slots, scaling, inner, outer,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, COPIES: tl.constexpr,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n_kv_heads = n_heads // GROUP
    batch, kv_head = (
        (tl.program_id(0) // n_kv_heads).to(tl.int64),
        (tl.program_id(0) % n_kv_heads).to(tl.int64),
    )
    split, tile = tl.program_id(1), tl.program_id(2)
    row = batch * n_tables + kv_head % n_tables
    head = kv_head * GROUP + split * HEADS
    query += batch * query_b + head * query_h
    d_out += batch * d_out_b + head * d_out_h
    lse += (batch * n_heads + head) * seq
    delta += (batch * n_heads + head) * seq
    key += batch * key_b + kv_head * key_h
    value += batch * value_b + kv_head * value_h
    # Gradients are [split batch seq kv_head dim].
    at = (split * tl.num_programs(0) // n_kv_heads + batch) * seq * n_kv_heads + kv_head
    d_key += at * DIM
    d_value += at * DIM_V
    places = tile * KEYS + tl.arange(0, KEYS)
    d_k = tl.zeros([KEYS, WIDTH], tl.float32)
    d_v = tl.zeros([KEYS, WIDTH_V], tl.float32)
    n_blocks = tl.cdiv(seq, BLOCK)
    if LISTED:
        table += row * n_blocks * n_slots
        owners = tl.full([KEYS], -1, tl.int32)
        if COPIES > 0:
            # Loaded as COPIES equal columns, one number for each thread. With fewer numbers than threads
            # the compiler would keep them in the layout of every use, which spills hundreds of bytes.
            slots = places[:, None] + tl.zeros([KEYS, COPIES], tl.int32)
            upcoming = tl.load(table + slots, mask=slots < n_slots, other=0)
        n_spans = n_blocks
    else:
        owners = places
        n_spans = 1
    for span in range(0, n_spans):
        if LISTED:
            first = span * BLOCK
            if COPIES > 0:
                entry = tl.max(upcoming, 1)
                left = entry & 255
                keys, evictions, is_key = entry >> 8, first + left, left > 0
                # The next entries arrive while this span is computed; no key can be loaded before them.
                is_next = (slots < n_slots) & (span + 1 < n_spans)
                upcoming = tl.load(table + (span + 1) * n_slots + slots, mask=is_next, other=0)
            else:
                keys, evictions, is_key = _tile_of_keys(
                    table + span * n_slots, evicted_at, places, n_slots, first, LISTED
                )
            new_owners = tl.where(is_key, keys, -1)
            is_over = new_owners != owners
            is_done = is_over & (owners >= 0)
            # Rarely true; skipping the stores saves their layout conversions.
            if tl.max(is_done.to(tl.int32), 0) > 0:
                _store_rows(d_key, owners, is_done, n_kv_heads * DIM, d_k * scaling, DIM, WIDTH)
                _store_rows(d_value, owners, is_done, n_kv_heads * DIM_V, d_v, DIM_V, WIDTH_V)
            d_k = tl.where(is_over[:, None], 0.0, d_k)
            d_v = tl.where(is_over[:, None], 0.0, d_v)
            owners = new_owners
            n_tiles = BLOCK // QUERIES
            n_steps = tl.where(tl.max(is_key.to(tl.int32), 0) > 0, HEADS * n_tiles, 0)
        else:
            first = tile * KEYS // QUERIES * QUERIES
            keys, evictions, is_key = _tile_of_keys(table, evicted_at + row * seq, places, seq, first, LISTED)
            n_tiles = tl.cdiv(seq - first, QUERIES)
            n_steps = HEADS * n_tiles
        k = _rows(key, keys, is_key, key_s, DIM, WIDTH)
        v = _rows(value, keys, is_key, value_s, DIM_V, WIDTH_V)
        for step in range(0, n_steps):
            member = (step // n_tiles).to(tl.int64)
            queries = first + step % n_tiles * QUERIES + tl.arange(0, QUERIES)
            is_query = queries < seq
            q = _rows(query + member * query_h, queries, is_query, query_s, DIM, WIDTH)
            level = tl.load(lse + member * seq + queries, mask=is_query, other=float("inf"))
            logits = _base2(tl.dot(k, tl.trans(q), input_precision=PRECISION), inner, outer, CAPPED)
            is_visible = (keys[:, None] <= queries[None, :]) & (queries[None, :] < evictions[:, None])
            weights = tl.where(is_visible, tl.exp2(logits - level[None, :]), 0.0)
            d_o = _rows(d_out + member * d_out_h, queries, is_query, d_out_s, DIM_V, WIDTH_V)
            d_v = tl.dot(weights.to(d_o.dtype), d_o, d_v, input_precision=PRECISION)
            shift = tl.load(delta + member * seq + queries, mask=is_query, other=0.0)
            d_weights = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
            d_logits = weights * (d_weights - shift[None, :])
            if CAPPED:
                d_logits = d_logits * (1.0 - (logits / outer) * (logits / outer))
            d_k = tl.dot(d_logits.to(q.dtype), q, d_k, input_precision=PRECISION)
    is_owned = (owners >= 0) & (owners < seq)
    _store_rows(d_key, owners, is_owned, n_kv_heads * DIM, d_k * scaling, DIM, WIDTH)
    _store_rows(d_value, owners, is_owned, n_kv_heads * DIM_V, d_v, DIM_V, WIDTH_V)


@triton.jit
@no_type_check
def _delta(
    out, d_out, d_lse, delta, out_b, out_h, out_s, d_out_b, d_out_h, d_out_s, n_heads, seq,
    DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // n_heads).to(tl.int64), (tl.program_id(0) % n_heads).to(tl.int64)
    queries = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    is_query = queries < seq
    o = _rows(out + batch * out_b + head * out_h, queries, is_query, out_s, DIM_V, WIDTH_V)
    d_o = _rows(d_out + batch * d_out_b + head * d_out_h, queries, is_query, d_out_s, DIM_V, WIDTH_V)
    at = (batch * n_heads + head) * seq + queries
    # The saved log-sum-exp is in base 2.
    d_natural = tl.load(d_lse + at, mask=is_query, other=0.0) * LOG2E
    tl.store(delta + at, tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1) - d_natural, mask=is_query)
