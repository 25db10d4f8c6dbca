/* Slices of a prompt: a block of queries of all the heads that share a KV head, against blocks of keys, as products of small matrices.
   Blocks of keys begin at multiples of their length in the sequence, so that a query's result does not depend on where its slice began. */
#include "attention.h"

#if MANY_REGISTERS
enum { WIDE = 4 };
#else
enum { WIDE = 2 };
#endif

/* The queries stand as position, head of the group: query m is at position m / group of the block. */
typedef struct {
    float *query;  /* [queries, padded], scaled */
    float *scores; /* [queries, BLOCK_KEYS] */
    float *sums;   /* [queries, padded] */
    float *keys;   /* [padded, BLOCK_KEYS] */
    float *values; /* [BLOCK_KEYS, padded] */
    float *most, *sum, *shrink;
} block_state;

static int64_t block_queries(const hx_plan *plan) { return hx_up(plan->positions * plan->group, STRIP); }

int64_t hx_slice_bytes(const hx_plan *plan) {
    const int64_t queries = block_queries(plan);
    return (queries * (2 * plan->padded + BLOCK_KEYS) + 2 * BLOCK_KEYS * plan->padded + 3 * hx_up(queries, 16)) * 4;
}

/* c[STRIP, wide vectors] = a[STRIP, depth] * b[depth, wide vectors], added to c * shrink[row] where `shrink` is. */
HX_INLINE void strip(const int wide, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride, const float *shrink) {
    vf sums[STRIP][WIDE];
    for (int row = 0; row < STRIP; row++)
        for (int v = 0; v < wide; v++)
            sums[row][v] = shrink ? hx_load(c + row * c_stride + v * VW, HX_F32) * shrink[row] : (vf){0};
    for (int64_t k = 0; k < depth; k++) {
        vf x[WIDE];
        for (int v = 0; v < wide; v++)
            x[v] = hx_load(b + k * b_stride + v * VW, HX_F32);
        for (int row = 0; row < STRIP; row++) {
            const vf y = hx_all(a[row * a_stride + k]);
            for (int v = 0; v < wide; v++)
                sums[row][v] += y * x[v];
        }
    }
    for (int row = 0; row < STRIP; row++)
        for (int v = 0; v < wide; v++)
            hx_store(c + row * c_stride + v * VW, sums[row][v], HX_F32);
}

/* As `strip`, for rows `first` .. `last` (a multiple of STRIP apart) and `columns`, a multiple of VW. */
static void multiply(int64_t first, int64_t last, int64_t columns, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride, const float *shrink) {
    int64_t column = 0;
    for (; column + WIDE * VW <= columns; column += WIDE * VW)
        for (int64_t row = first; row < last; row += STRIP)
            strip(WIDE, a + row * a_stride, a_stride, b + column, b_stride, depth, c + row * c_stride + column, c_stride, shrink ? shrink + row : 0);
    for (; column < columns; column += VW)
        for (int64_t row = first; row < last; row += STRIP)
            strip(1, a + row * a_stride, a_stride, b + column, b_stride, depth, c + row * c_stride + column, c_stride, shrink ? shrink + row : 0);
}

/* K of `count` keys from `from` on, a column each, and V, a row each; zeros in the place of keys that are not there. */
static void gather(const hx_plan *plan, const block_state *state, int64_t row, int64_t head, int64_t from, int64_t count) {
    const hx_attention *call = plan->call;
    const int64_t bytes = call->dimension * hx_item_bytes(call->page_type), padded = plan->padded;
    const int32_t *table = call->tables + row * call->width;
    for (int64_t key = 0; key < BLOCK_KEYS; key += VW) {
        float wide[VW][256];
        for (int64_t k = 0; k < VW; k++) {
            const int64_t at = from + key + k;
            if (key + k >= count) {
                memset(wide[k], 0, (size_t)(padded * 4));
                continue;
            }
            const int64_t frame = table[at / call->page_tokens], token = at % call->page_tokens;
            hx_widen(wide[k], hx_at(call, frame, token, 0) + head * bytes, call->dimension, padded, call->page_type, 1.0f);
            hx_widen(state->values + (key + k) * padded, hx_at(call, frame, token, 1) + head * bytes, call->dimension, padded, call->page_type, 1.0f);
        }
        for (int64_t i = 0; i < padded; i++) {
            vf column;
            for (int k = 0; k < VW; k++)
                column[k] = wide[k][i];
            hx_store(state->keys + i * BLOCK_KEYS + key, column, HX_F32);
        }
    }
}

/* From scores to weights of one query, which sees keys `first` .. `last` of the block. */
HX_INLINE void soften(float *scores, int64_t first, int64_t last, float softcap, float *most, float *sum, float *shrink) {
    vf x[BLOCK_KEYS / VW], top = hx_all(LEAST), total = {0};
    const int whole = first <= 0 && last >= BLOCK_KEYS;
    if (softcap > 0)
        for (int v = 0; v < BLOCK_KEYS / VW; v++)
            hx_store(scores + v * VW, hx_tanh(hx_load(scores + v * VW, HX_F32) / softcap) * softcap, HX_F32);
    if (!whole) {
        for (int64_t key = 0; key < hx_less(first, BLOCK_KEYS); key++)
            scores[key] = -__builtin_inff();
        for (int64_t key = hx_more(0, last); key < BLOCK_KEYS; key++)
            scores[key] = -__builtin_inff();
    }
    for (int v = 0; v < BLOCK_KEYS / VW; v++) {
        x[v] = hx_load(scores + v * VW, HX_F32);
        top = hx_max(x[v], top);
    }
    const float block = hx_most(top);
    *shrink = 1.0f;
    if (block > *most) {
        *shrink = hx_exp(hx_all(*most - block))[0];
        *most = block;
    }
    for (int v = 0; v < BLOCK_KEYS / VW; v++) {
        const vf weight = hx_exp(x[v] - *most);
        total += weight;
        hx_store(scores + v * VW, weight, HX_F32);
    }
    *sum = *sum * *shrink + hx_sum(total);
}

/* The block's queries against the keys from `from` on, of which `count` are there. */
static void step(const hx_plan *plan, block_state *state, int64_t queries, int64_t position, int64_t from, int64_t count) {
    const hx_attention *call = plan->call;
    const int64_t seen = hx_more(0, from - position) * plan->group / STRIP * STRIP, last = hx_up(queries, STRIP);
    multiply(seen, last, BLOCK_KEYS, state->query, plan->padded, state->keys, BLOCK_KEYS, plan->padded, state->scores, BLOCK_KEYS, 0);
    for (int64_t m = seen; m < queries; m++) {
        const int64_t at = position + m / plan->group;
        soften(state->scores + m * BLOCK_KEYS, hx_first_visible(call, at) - from, at + 1 - from, call->softcap, state->most + m, state->sum + m, state->shrink + m);
    }
    multiply(seen, last, plan->padded, state->scores, BLOCK_KEYS, state->values, plan->padded, count, state->sums, plan->padded, state->shrink);
}

void hx_slice(const hx_plan *plan, int64_t row, int64_t unit, char *scratch) {
    const hx_attention *call = plan->call;
    const int64_t block = unit / call->kv_heads, head = unit % call->kv_heads, padded = plan->padded;
    const int64_t all = hx_count(call, row), first = block * plan->positions, count = hx_less(plan->positions, all - first);
    const int64_t token = call->starts[row] + first, position = call->ends[row] - all + first;
    const int64_t queries = count * plan->group, most = block_queries(plan);
    block_state state = {.query = (float *)scratch};
    state.scores = state.query + most * padded;
    state.sums = state.scores + most * BLOCK_KEYS;
    state.keys = state.sums + most * padded;
    state.values = state.keys + BLOCK_KEYS * padded;
    state.most = state.values + BLOCK_KEYS * padded;
    state.sum = state.most + hx_up(most, 16);
    state.shrink = state.sum + hx_up(most, 16);
    memset(state.query + queries * padded, 0, (size_t)((hx_up(queries, STRIP) - queries) * padded * 4));
    memset(state.sums, 0, (size_t)(hx_up(queries, STRIP) * padded * 4));
    for (int64_t m = 0; m < hx_up(queries, STRIP); m++) {
        state.most[m] = LEAST, state.sum[m] = 0.0f, state.shrink[m] = 1.0f;
        if (m < queries)
            hx_widen(state.query + m * padded, call->query + (token + m / plan->group) * call->query_token + (head * plan->group + m % plan->group) * call->query_head, call->dimension, padded, call->type, call->scale);
    }
    const int64_t end = position + count;
    for (int64_t from = hx_first_visible(call, position) / BLOCK_KEYS * BLOCK_KEYS; from < end; from += BLOCK_KEYS) {
        const int64_t there = hx_less(BLOCK_KEYS, end - from);
        gather(plan, &state, row, head, from, there);
        step(plan, &state, queries, position, from, there);
    }
    for (int64_t m = 0; m < queries; m++) {
        const int64_t query_head = head * plan->group + m % plan->group;
        float factor = 1.0f / state.sum[m];
        if (call->sinks) {
            const float sink = call->sinks[query_head], top = sink > state.most[m] ? sink : state.most[m];
            const float mine = hx_exp(hx_all(state.most[m] - top))[0];
            factor = mine / (state.sum[m] * mine + hx_exp(hx_all(sink - top))[0]);
        }
        hx_narrow(call->out + (token + m / plan->group) * call->out_token + query_head * call->out_head, state.sums + m * padded, call->dimension, call->type, factor);
    }
}
