/* Packed weights as numbers again: rows that an embedding looks up, and whole weights where another library multiplies faster. */
#include "lanes.h"
#include "matmul.h"

/* Column `column` of row `row` of a panel. */
HX_INLINE float weight_at(const hx_linear *linear, const unsigned char *panel, long row, long column) {
    const long block = column / BLOCK, in_block = column % BLOCK;
    if (linear->kind == KIND_FP32) return ((const float *)panel)[column * PANEL + row];
    if (linear->kind == KIND_BF16) {
        union { uint32_t bits; float value; } out = {(uint32_t)((const uint16_t *)panel)[(column / 2 * PANEL + row) * 2 + column % 2] << 16};
        return out.value;
    }
    uint16_t with[LANES] = {0};
    if (linear->kind == KIND_INT8) {
        with[0] = ((const uint16_t *)(panel + linear->k / BLOCK * 512))[block * PANEL + row];
        return (float)((const int8_t *)panel)[(column / 4 * PANEL + row) * 4 + column % 4] * halves(with)[0];
    }
    const unsigned char *from = panel + block * 320;
    const unsigned char pair = from[(in_block / 8 * PANEL + row) * 4 + in_block % 4];
    with[0] = ((const uint16_t *)(from + 256))[row], with[1] = ((const uint16_t *)(from + 256))[PANEL + row];
    const vf numbers = halves(with);
    return (float)(in_block % 8 < 4 ? pair & 15 : pair >> 4) * numbers[0] + numbers[1];
}

/* out[count, k]: the rows `ids` of W. Ids are in range. */
HX_API void hx_unpack_rows(const hx_linear *linear, const int64_t *ids, int64_t count, float *out) {
    for (long i = 0; i < count; i++, out += linear->k) {
        const unsigned char *panel = linear->packed + ids[i] / PANEL * linear->stride;
        for (long column = 0; column < linear->k; column++) out[column] = weight_at(linear, panel, ids[i] % PANEL, column);
    }
}

typedef struct {
    const hx_linear *linear;
    uint16_t *out;
} whole;

HX_INLINE uint16_t rounded(float value) {
    union { float value; uint32_t bits; } in = {value};
    return (uint16_t)((in.bits + 0x7fffu + (in.bits >> 16 & 1u)) >> 16);
}

static void unpack_part(void *given, int thread, int threads) {
    const whole *job = given;
    const hx_linear *linear = job->linear;
    const long panels = (linear->n + PANEL - 1) / PANEL;
    for (long at = panels * thread / threads; at < panels * (thread + 1) / threads; at++)
        for (long row = at * PANEL; row < linear->n && row < (at + 1) * PANEL; row++)
            for (long column = 0; column < linear->k; column++)
                job->out[row * linear->k + column] = rounded(weight_at(linear, linear->packed + at * linear->stride, row % PANEL, column));
}

/* out[n, k] in bf16, to the nearest. */
HX_API void hx_unpack_bf16(const hx_linear *linear, uint16_t *out, int threads) {
    whole job = {linear, out};
    hx_team_run(threads, unpack_part, &job);
}
