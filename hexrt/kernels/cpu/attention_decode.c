/* Rows of one token: each K and V is read once for all the query heads that share it. The softmax is kept up as keys come; the parts of
   a row are put together in their order by whichever thread computes the last of them. */
#include "attention.h"

enum { MOST_QUERIES = MANY_REGISTERS ? 4 : 3 }; /* at once, so that the sums stay in registers */

/* What a unit works with. The queries are scaled already; for each query head of the unit: */
typedef struct {
    float *query;  /* [head, padded] */
    float *values; /* [head, padded]: weighted sum so far */
    float *most, *sum;
    float *keys_wide, *values_wide; /* [KEYS, padded], where d is no whole number of vectors */
} hx_state;

int64_t hx_decode_bytes(const hx_plan *plan) {
    return (2 * plan->call->heads * plan->padded + 2 * hx_up(plan->call->heads, 16) + 2 * KEYS * plan->padded) * 4;
}

/* Scores of `count` keys at `keys`, `stride` bytes apart, for `queries` queries: scores[query][key]. Past `count` they are anything.
   What the next step will read is sent for at the same pace: a page ends where the processor's own foresight does. */
HX_INLINE void score(const int queries, const int type, const float *query, int64_t padded, const char *keys, const char *ahead, int64_t stride, int64_t count, float (*scores)[KEYS]) {
    const int64_t item = hx_item_bytes(type);
    for (int64_t key = 0; key < count; key += 4) {
        const char *at[4];
        for (int k = 0; k < 4; k++) {
            at[k] = keys + hx_less(key + k, count - 1) * stride;
            if (ahead)
                for (int64_t i = 0; i < padded * item; i += ALIGN_BYTES)
                    __builtin_prefetch(ahead + (key + k) * stride + i);
        }
        vf sums[MOST_QUERIES][4] = {{{0}}};
        for (int64_t i = 0; i < padded; i += VW)
            for (int k = 0; k < 4; k++) {
                const vf x = hx_load(at[k] + i * item, type);
                for (int q = 0; q < queries; q++)
                    sums[q][k] += hx_load(query + q * padded + i, HX_F32) * x;
            }
        for (int q = 0; q < queries; q++)
            hx_sum4(sums[q][0], sums[q][1], sums[q][2], sums[q][3], &scores[q][key]);
    }
}

/* values[query] = values[query] * shrink[query] + the sum of weights[query][key] * value of key; `wide` vectors from `i` on. */
HX_INLINE void weigh(const int queries, const int type, const int wide, float *values, int64_t padded, int64_t i, const float *shrink, const char *from, const char *ahead, int64_t stride, int64_t count, float (*weights)[KEYS]) {
    const int64_t item = hx_item_bytes(type);
    vf sums[MOST_QUERIES][4];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < wide; v++)
            sums[q][v] = hx_load(values + q * padded + i + v * VW, HX_F32) * shrink[q];
    for (int64_t key = 0; key < count; key++) {
        vf x[4];
        if (ahead)
            for (int v = 0; v < wide; v += ALIGN_BYTES / (VW * hx_item_bytes(type)))
                __builtin_prefetch(ahead + key * stride + (i + v * VW) * item);
        for (int v = 0; v < wide; v++)
            x[v] = hx_load(from + key * stride + (i + v * VW) * item, type);
        for (int q = 0; q < queries; q++) {
            const vf weight = hx_all(weights[q][key]);
            for (int v = 0; v < wide; v++)
                sums[q][v] += weight * x[v];
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < wide; v++)
            hx_store(values + q * padded + i + v * VW, sums[q][v], HX_F32);
}

/* From scores to weights, with the query's most and sum kept up; how much what was summed before shrinks. */
HX_INLINE float soften(float *scores, int64_t count, float softcap, float *most, float *sum) {
    vf x[KEYS / VW], top = hx_all(LEAST), total = {0};
    for (int64_t key = count; key < KEYS; key++)
        scores[key] = -__builtin_inff();
    for (int v = 0; v < KEYS / VW; v++) {
        x[v] = hx_load(scores + v * VW, HX_F32);
        if (softcap > 0)
            x[v] = hx_tanh(x[v] / softcap) * softcap;
        if (softcap > 0 && (v + 1) * VW > count) /* what is hidden is capped to a number */
            for (int64_t key = hx_more(count, v * VW); key < (v + 1) * VW; key++)
                x[v][key - v * VW] = -__builtin_inff();
        top = hx_max(x[v], top);
    }
    const float block = hx_most(top);
    float shrink = 1.0f;
    if (block > *most) {
        shrink = hx_exp(hx_all(*most - block))[0];
        *most = block;
    }
    for (int v = 0; v < KEYS / VW; v++) {
        const vf weight = hx_exp(x[v] - *most);
        total += weight;
        hx_store(scores + v * VW, weight, HX_F32);
    }
    *sum = *sum * shrink + hx_sum(total);
    return shrink;
}

HX_INLINE void step(const int queries, const int type, hx_state *state, int64_t head, int64_t padded, float softcap, const char *keys, const char *values, const char *keys_ahead, const char *values_ahead, int64_t stride, int64_t count) {
    float scores[MOST_QUERIES][KEYS], shrink[MOST_QUERIES];
    score(queries, type, state->query + head * padded, padded, keys, keys_ahead, stride, count, scores);
    for (int q = 0; q < queries; q++)
        shrink[q] = soften(scores[q], count, softcap, state->most + head + q, state->sum + head + q);
    float *sums = state->values + head * padded;
    int64_t i = 0;
    for (; i + 4 * VW <= padded; i += 4 * VW)
        weigh(queries, type, 4, sums, padded, i, shrink, values, values_ahead, stride, count, scores);
    if (i + 2 * VW <= padded) {
        weigh(queries, type, 2, sums, padded, i, shrink, values, values_ahead, stride, count, scores);
        i += 2 * VW;
    }
    if (i < padded)
        weigh(queries, type, 1, sums, padded, i, shrink, values, values_ahead, stride, count, scores);
}

HX_INLINE void step_typed(const int type, hx_state *state, int64_t head, int64_t queries, int64_t padded, float softcap, const char *keys, const char *values, const char *keys_ahead, const char *values_ahead, int64_t stride, int64_t count) {
    while (queries) { /* four in twos, where there are registers for three at most */
        const int64_t now = !MANY_REGISTERS && queries == 4 ? 2 : hx_less(queries, MOST_QUERIES);
        if (now == 1)
            step(1, type, state, head, padded, softcap, keys, values, keys_ahead, values_ahead, stride, count);
        else if (now == 2)
            step(2, type, state, head, padded, softcap, keys, values, keys_ahead, values_ahead, stride, count);
        else if (now == 3)
            step(3, type, state, head, padded, softcap, keys, values, keys_ahead, values_ahead, stride, count);
#if MANY_REGISTERS
        else
            step(4, type, state, head, padded, softcap, keys, values, keys_ahead, values_ahead, stride, count);
#endif
        head += now, queries -= now, keys_ahead = values_ahead = 0; /* sent for once */
    }
}

/* `count` keys of one KV head; they and their values lie `stride` bytes apart. */
static void step_any(const hx_plan *plan, hx_state *state, int64_t head, const char *keys, const char *values, const char *keys_ahead, const char *values_ahead, int64_t stride, int64_t count) {
    const hx_attention *call = plan->call;
    int type = call->page_type;
    if (plan->padded != call->dimension) {
        for (int64_t key = 0; key < count; key++) {
            hx_widen(state->keys_wide + key * plan->padded, keys + key * stride, call->dimension, plan->padded, type, 1.0f);
            hx_widen(state->values_wide + key * plan->padded, values + key * stride, call->dimension, plan->padded, type, 1.0f);
        }
        keys = (const char *)state->keys_wide, values = (const char *)state->values_wide, keys_ahead = values_ahead = 0, stride = plan->padded * 4, type = HX_F32;
    }
    if (type == HX_F32)
        step_typed(HX_F32, state, head, plan->group, plan->padded, call->softcap, keys, values, keys_ahead, values_ahead, stride, count);
    else if (type == HX_BF16)
        step_typed(HX_BF16, state, head, plan->group, plan->padded, call->softcap, keys, values, keys_ahead, values_ahead, stride, count);
    else
        step_typed(HX_F16, state, head, plan->group, plan->padded, call->softcap, keys, values, keys_ahead, values_ahead, stride, count);
}

/* Writes a head's result from the parts of its row, in their order. */
static void join(const hx_plan *plan, const float *first, int64_t parts, int64_t head, char *out) {
    const hx_attention *call = plan->call;
    const int64_t stride = call->heads * plan->part_floats;
    float most = call->sinks ? call->sinks[head] : LEAST, values[256], sum;
    for (int64_t part = 0; part < parts; part++)
        most = first[part * stride] > most ? first[part * stride] : most;
    sum = call->sinks ? hx_exp(hx_all(call->sinks[head] - most))[0] : 0.0f;
    for (int64_t i = 0; i < plan->padded; i += VW)
        hx_store(values + i, (vf){0}, HX_F32);
    for (int64_t part = 0; part < parts; part++) {
        const float *from = first + part * stride, factor = hx_exp(hx_all(from[0] - most))[0];
        sum += from[1] * factor;
        for (int64_t i = 0; i < plan->padded; i += VW)
            hx_store(values + i, hx_load(values + i, HX_F32) + hx_load(from + 2 + i, HX_F32) * factor, HX_F32);
    }
    hx_narrow(out, values, call->dimension, call->type, 1.0f / sum);
}

/* Keys `from` .. `end` of a row for KV heads `first` .. `last`: a page's K, then its V, as they lie in memory. */
static void walk(const hx_plan *plan, int64_t row, hx_state *state, int64_t from, int64_t end, int64_t first, int64_t last) {
    const hx_attention *call = plan->call;
    const int64_t bytes = call->dimension * hx_item_bytes(call->page_type), stride = call->kv_heads * bytes;
    const int32_t *table = call->tables + row * call->width;
    while (from < end) {
        const int64_t frame = table[from / call->page_tokens], token = from % call->page_tokens;
        const int64_t count = hx_less(hx_less(call->page_tokens - token, KEYS), end - from);
        const char *keys = hx_at(call, frame, token, 0), *values = hx_at(call, frame, token, 1);
        const int64_t next = from + count;
        const char *ahead = next < end ? hx_at(call, table[next / call->page_tokens], next % call->page_tokens, 0) : 0;
        const char *values_ahead = ahead ? ahead + call->page_tokens * stride : 0;
        for (int64_t head = first; head < last; head++) {
            const int64_t at = head * bytes;
            step_any(plan, state, (head - first) * plan->group, keys + at, values + at, ahead ? ahead + at : 0, ahead ? values_ahead + at : 0, stride, count);
        }
        from += count;
    }
}

void hx_decode(hx_plan *plan, int64_t row, int64_t unit, char *scratch) {
    const hx_attention *call = plan->call;
    const int64_t parts = plan->first_part[row + 1] - plan->first_part[row], part = unit / plan->splits, split = unit % plan->splits;
    const int64_t first = call->kv_heads * split / plan->splits, last = call->kv_heads * (split + 1) / plan->splits;
    const int64_t end = call->ends[row], token = call->starts[row], keys = hx_part_keys(end);
    const int64_t heads = (last - first) * plan->group, head = first * plan->group;
    if (part == parts - 1 && !plan->slices)
        hx_write(call, token, first, last);
    hx_state state = {.query = (float *)scratch};
    state.values = state.query + call->heads * plan->padded;
    state.keys_wide = state.values + call->heads * plan->padded;
    state.values_wide = state.keys_wide + KEYS * plan->padded;
    state.most = state.values_wide + KEYS * plan->padded;
    state.sum = state.most + hx_up(call->heads, 16);
    for (int64_t h = 0; h < heads; h++) {
        hx_widen(state.query + h * plan->padded, call->query + token * call->query_token + (head + h) * call->query_head, call->dimension, plan->padded, call->type, call->scale);
        state.most[h] = LEAST, state.sum[h] = 0.0f;
    }
    memset(state.values, 0, (size_t)(heads * plan->padded * 4));
    walk(plan, row, &state, hx_more(part * keys, hx_first_visible(call, end - 1)), hx_less(end, (part + 1) * keys), first, last);
    float *rows_parts = plan->parts + plan->first_part[row] * call->heads * plan->part_floats;
    for (int64_t h = 0; h < heads; h++) {
        float *to = rows_parts + (part * call->heads + head + h) * plan->part_floats;
        to[0] = state.most[h], to[1] = state.sum[h];
        memcpy(to + 2, state.values + h * plan->padded, (size_t)(plan->padded * 4));
    }
    if (__atomic_add_fetch(&plan->done[row * plan->splits + split], 1, __ATOMIC_ACQ_REL) == parts)
        for (int64_t h = head; h < head + heads; h++)
            join(plan, rows_parts + h * plan->part_floats, parts, h, call->out + token * call->out_token + h * call->out_head);
}
