/* The entry of attention over pages: checks a call, writes K and V, cuts the work into units and lets the threads take them. */
#include "attention.h"

void hx_widen(float *to, const char *from, int64_t count, int64_t padded, int type, float factor) {
    const int64_t item = hx_item_bytes(type);
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        hx_store(to + i, hx_load(from + i * item, type) * factor, HX_F32);
    if (i < count) {
        hx_store(to + i, hx_load_some(from + i * item, (int)(count - i), type) * factor, HX_F32);
        i += VW;
    }
    for (; i < padded; i += VW)
        hx_store(to + i, (vf){0}, HX_F32);
}

void hx_narrow(char *out, const float *x, int64_t count, int type, float factor) {
    const int64_t item = hx_item_bytes(type);
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        hx_store(out + i * item, hx_load(x + i, HX_F32) * factor, type);
    if (i < count)
        hx_store_some(out + i * item, hx_load_some(x + i, (int)(count - i), HX_F32) * factor, (int)(count - i), type);
}

static void convert(char *to, const char *from, int64_t count, int to_type, int from_type) {
    const int64_t to_item = hx_item_bytes(to_type), from_item = hx_item_bytes(from_type);
    if (to_type == from_type) {
        memcpy(to, from, (size_t)(count * to_item));
        return;
    }
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        hx_store(to + i * to_item, hx_load(from + i * from_item, from_type), to_type);
    if (i < count)
        hx_store_some(to + i * to_item, hx_load_some(from + i * from_item, (int)(count - i), from_type), (int)(count - i), to_type);
}

void hx_write(const hx_attention *call, int64_t token, int64_t first, int64_t last) {
    const int64_t slot = call->slots[token], bytes = call->dimension * hx_item_bytes(call->page_type);
    if (slot < 0)
        return;
    char *key = hx_at(call, slot / call->page_tokens, slot % call->page_tokens, 0);
    char *value = hx_at(call, slot / call->page_tokens, slot % call->page_tokens, 1);
    for (int64_t head = first; head < last; head++) {
        convert(key + head * bytes, call->key + token * call->key_token + head * call->key_head, call->dimension, call->page_type, call->type);
        convert(value + head * bytes, call->value + token * call->value_token + head * call->value_head, call->dimension, call->page_type, call->type);
    }
}

/* 0, or what is wrong: nothing outside the arena and the tensors is ever touched. */
static int fault(const hx_attention *call) {
    const int64_t slots = call->frames * call->page_tokens;
    int64_t at = call->rows ? call->starts[0] : 0;
    if (at < 0)
        return 1;
    for (int64_t row = 0; row < call->rows; row++) {
        const int64_t end = call->ends[row], next = call->starts[row + 1];
        if (next < at || next > call->tokens)
            return 1;
        if (end > 0 && (next - at > end || end > call->width * call->page_tokens))
            return 2;
        const int32_t *table = call->tables + row * call->width;
        uint32_t most = 0; /* a negative number is a large one */
        if (end > 0 && next > at)
            for (int64_t page = hx_first_visible(call, end - (next - at)) / call->page_tokens; page * call->page_tokens < end; page++)
                most = (uint32_t)table[page] > most ? (uint32_t)table[page] : most;
        if ((int64_t)most >= call->frames)
            return 3;
        at = next;
    }
    for (int64_t token = 0; token < call->tokens; token++)
        if (call->slots[token] >= slots)
            return 4;
    return 0;
}

static void measure(hx_plan *plan, const hx_attention *call) {
    plan->call = call;
    plan->group = call->heads / call->kv_heads;
    plan->padded = hx_up(call->dimension, VW);
    plan->part_floats = hx_up(plan->padded + 2, VW);
    plan->positions = hx_more(1, (call->dimension > 128 ? 96 : 192) / plan->group);
    plan->thread_bytes = hx_up(hx_more(hx_decode_bytes(plan), hx_slice_bytes(plan)), ALIGN_BYTES);
}

static int64_t most_parts(const hx_attention *call) {
    return hx_less(MOST_PARTS, (call->width * call->page_tokens + PART_KEYS - 1) / PART_KEYS);
}

/* Bytes of scratch memory that calls of this shape need, whatever is in their tensors. */
HX_API int64_t hx_attention_scratch(const hx_attention *call) {
    hx_plan plan;
    measure(&plan, call);
    return ALIGN_BYTES * 5 + 2 * (call->rows + 1) * 8 + call->rows * call->kv_heads * 4 +
           call->rows * most_parts(call) * call->heads * plan.part_floats * 4 + call->threads * plan.thread_bytes;
}

HX_API int64_t hx_attention_bytes(void) { return (int64_t)sizeof(hx_attention); }

static char *take(char **at, int64_t bytes) {
    char *found = *at;
    *at += hx_up(bytes, ALIGN_BYTES);
    return found;
}

/* Cuts the rows into units. */
static void cut(hx_plan *plan) {
    const hx_attention *call = plan->call;
    char *at = (char *)hx_up((int64_t)(uintptr_t)call->scratch, ALIGN_BYTES);
    plan->first_unit = (int64_t *)take(&at, (call->rows + 1) * 8);
    plan->first_part = (int64_t *)take(&at, (call->rows + 1) * 8);
    int64_t parts = 0;
    plan->slices = 0;
    for (int64_t row = 0; row < call->rows; row++) {
        const int64_t count = hx_count(call, row), keys = hx_part_keys(call->ends[row]);
        plan->first_part[row] = parts;
        parts += count == 1 ? (call->ends[row] + keys - 1) / keys : 0;
        plan->slices += count > 1;
    }
    plan->first_part[call->rows] = parts;
    plan->splits = hx_more(1, hx_less(call->kv_heads, parts ? 4 * call->threads / parts : 1));
    plan->units = 0;
    for (int64_t row = 0; row < call->rows; row++) {
        const int64_t count = hx_count(call, row);
        plan->first_unit[row] = plan->units;
        if (count > 1)
            plan->units += (count + plan->positions - 1) / plan->positions * call->kv_heads;
        else
            plan->units += (plan->first_part[row + 1] - plan->first_part[row]) * plan->splits;
    }
    plan->first_unit[call->rows] = plan->units;
    plan->done = (int32_t *)take(&at, call->rows * plan->splits * 4);
    memset(plan->done, 0, (size_t)(call->rows * plan->splits * 4));
    plan->parts = (float *)take(&at, parts * call->heads * plan->part_floats * 4);
    plan->threads = at;
    plan->next = 0;
}

static void write_all(void *argument, int thread, int threads) {
    const hx_plan *plan = argument;
    const int64_t tokens = plan->call->tokens;
    for (int64_t token = tokens * thread / threads; token < tokens * (thread + 1) / threads; token++)
        hx_write(plan->call, token, 0, plan->call->kv_heads);
}

/* The row of a unit: the last that begins at it or before, and has units. */
static int64_t row_of(const hx_plan *plan, int64_t unit) {
    int64_t low = 0, high = plan->call->rows;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (plan->first_unit[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void attend(void *argument, int thread, int threads) {
    hx_plan *plan = argument;
    char *scratch = plan->threads + thread * plan->thread_bytes;
    (void)threads;
    for (int64_t turn; (turn = hx_next(&plan->next)) < plan->units;) {
        const int64_t unit = plan->units - 1 - turn; /* slices stand last, and their last blocks have the most keys */
        const int64_t row = row_of(plan, unit), within = unit - plan->first_unit[row];
        if (hx_count(plan->call, row) > 1)
            hx_slice(plan, row, within, scratch);
        else
            hx_decode(plan, row, within, scratch);
    }
}

static void clear(const hx_attention *call, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++)
        for (int64_t head = 0; head < call->heads; head++)
            memset(call->out + token * call->out_token + head * call->out_head, 0, (size_t)(call->dimension * hx_item_bytes(call->type)));
}

/* 0, or what was wrong, with nothing touched: 1 starts, 2 ends, 3 frames, 4 slots, 5 too little scratch memory. */
HX_API int hx_attention_run(const hx_attention *call) {
    const int wrong = fault(call);
    if (wrong)
        return wrong;
    if (call->scratch_bytes < hx_attention_scratch(call))
        return 5;
    hx_plan plan;
    measure(&plan, call);
    cut(&plan);
    clear(call, 0, call->rows ? call->starts[0] : call->tokens);
    for (int64_t row = 0; row < call->rows; row++)
        if (call->ends[row] <= 0)
            clear(call, call->starts[row], call->starts[row + 1]);
    if (call->rows)
        clear(call, call->starts[call->rows], call->tokens);
    if (plan.slices) /* a block of queries may need what another thread writes; a row of one token writes its own */
        hx_team_run((int)call->threads, write_all, &plan);
    hx_team_run(plan.units > 1 ? (int)call->threads : 1, attend, &plan); /* never some of them: the runtime would end the others */
    return 0;
}
