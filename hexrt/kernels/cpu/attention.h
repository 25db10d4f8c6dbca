/* Attention over pages: what a call is given (as hexrt/kernels/attention.py fills it in) and how its work is cut.

   A row of one token is cut into parts of its keys, whose length depends on the row alone, so that its result does too; a longer one into
   blocks of queries. Units of work are handed out one by one to the threads. */
#ifndef HEXRT_ATTENTION_H
#define HEXRT_ATTENTION_H

#include "team.h"
#include "vector.h"

enum {
    KEYS = 16,        /* of a step over keys; a multiple of VW */
    PART_KEYS = 256,  /* the shortest part of a row */
    MOST_PARTS = 16,
    BLOCK_KEYS = 64,  /* of a step of a block of queries */
    STRIP = 6,        /* queries that are multiplied together */
    ALIGN_BYTES = 64,
};

/* Less than every score, and a number: what is hidden gets e^(-inf - LEAST) = 0 even where nothing was seen yet. */
#define LEAST (-1e30f)

typedef struct {
    const char *query, *key, *value; /* [token, head, d] */
    char *out;
    char *pages; /* of the layer, in frame 0 */
    const int64_t *slots;
    const int32_t *tables, *starts, *ends;
    const float *sinks; /* or NULL */
    char *scratch;
    int64_t scratch_bytes, frame_bytes;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head; /* strides in bytes */
    int64_t tokens, rows, width, heads, kv_heads, dimension, page_tokens, frames, window, threads; /* window 0: none */
    int32_t type, page_type;
    float scale, softcap; /* softcap 0: none */
} hx_attention;

/* A call and what was worked out of it. Scratch memory: | units of rows | done | parts | of thread 0 | of thread 1 | ... */
typedef struct {
    const hx_attention *call;
    int64_t group;     /* query heads of a KV head */
    int64_t padded;    /* d, up to whole vectors */
    int64_t splits;    /* of the KV heads of a row of one token */
    int64_t positions; /* of a block of queries */
    int64_t part_floats, thread_bytes, units, slices;
    int64_t *first_unit; /* [rows + 1] */
    int32_t *done;       /* [rows, splits]: parts that are computed */
    float *parts;        /* [first part of the row + part, head, | most | sum | weighted values |] */
    int64_t *first_part; /* [rows + 1] */
    char *threads;
    _Alignas(ALIGN_BYTES) int64_t next; /* alone on its cache line: all threads write it */
} hx_plan;

HX_INLINE int64_t hx_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
HX_INLINE int64_t hx_less(int64_t a, int64_t b) { return a < b ? a : b; }
HX_INLINE int64_t hx_more(int64_t a, int64_t b) { return a > b ? a : b; }

HX_INLINE int64_t hx_count(const hx_attention *call, int64_t row) {
    return call->ends[row] > 0 ? call->starts[row + 1] - call->starts[row] : 0;
}

/* Keys of a part of a row with `end` keys. */
HX_INLINE int64_t hx_part_keys(int64_t end) { return hx_more(PART_KEYS, hx_up((end + MOST_PARTS - 1) / MOST_PARTS, KEYS)); }

HX_INLINE int64_t hx_first_visible(const hx_attention *call, int64_t position) {
    return call->window && position >= call->window ? position - call->window + 1 : 0;
}

/* Where K (0) or V (1) of a token lie, for KV head 0. */
HX_INLINE char *hx_at(const hx_attention *call, int64_t frame, int64_t token, int kind) {
    const int64_t heads = call->kv_heads * call->dimension * hx_item_bytes(call->page_type);
    return call->pages + frame * call->frame_bytes + (kind * call->page_tokens + token) * heads;
}

/* Writes K and V of a token into its page, KV heads `first` .. `last`. */
void hx_write(const hx_attention *call, int64_t token, int64_t first, int64_t last);

/* `count` numbers of `type` as floats, times `factor`, and zeros up to `padded`. */
void hx_widen(float *to, const char *from, int64_t count, int64_t padded, int type, float factor);
/* `out` = x * factor, rounded to its type. */
void hx_narrow(char *out, const float *x, int64_t count, int type, float factor);

int64_t hx_decode_bytes(const hx_plan *plan);
void hx_decode(hx_plan *plan, int64_t row, int64_t unit, char *scratch);
int64_t hx_slice_bytes(const hx_plan *plan);
void hx_slice(const hx_plan *plan, int64_t row, int64_t block, char *scratch);

#endif
