/* A decoder layer in two calls, what is before its attention and what is after it, float32 throughout:

       before   q, k, v = x_norm Wqkv; q and k normed by head where the model does that, then turned by their positions
       after    x += norm(attended Wo); x += norm((act(gate) * up) Wdown) with gate, up = x_norm Wgate_up

   The norms in brackets only where the layer has them. Rows of the gate and of `up` lie in turns, 16 of one, 16 of the other, so that who
   made one made the other. Threads meet between the products. */
#include <math.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "matmul.h"
#include "vector.h"

enum { SILU = 0, GELU_TANH = 1, GELU = 2 };
#define SPINS 1000 /* some 30 us: longer waits are of a thread that lost its core */
#define STRIPE 128

/* A norm that the layer does not have is null. */
typedef struct {
    int64_t heads, kv_heads, head_dim, activation;
    float eps, unused;
    const float *norm, *query_norm, *key_norm, *attended_norm, *mlp_norm, *mlp_out_norm;
    hx_linear qkv, out, gate_up, down;
} hx_layer;

typedef struct {
    int arrived, round, asleep;
} meeting;

/* `round` is a futex: who sleeps is counted before the kernel compares it, so a wake is never missed. */
static void sleep_until(meeting *at, int round) {
#if defined(__linux__)
    __atomic_add_fetch(&at->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&at->round, __ATOMIC_SEQ_CST) == round) syscall(SYS_futex, &at->round, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
    __atomic_sub_fetch(&at->asleep, 1, __ATOMIC_SEQ_CST);
#else
    while (__atomic_load_n(&at->round, __ATOMIC_ACQUIRE) == round) sched_yield();
#endif
}

/* Returns when all threads of the team are here. */
static void meet(meeting *at, int threads) {
    if (threads == 1) return;
    const int round = __atomic_load_n(&at->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&at->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&at->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&at->round, round + 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
        if (__atomic_load_n(&at->asleep, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &at->round, FUTEX_WAKE_PRIVATE, threads, 0, 0, 0);
#endif
        return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
        if (__atomic_load_n(&at->round, __ATOMIC_ACQUIRE) != round) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    sleep_until(at, round);
}

typedef struct {
    int64_t from, to;
} range;

HX_INLINE range share(int64_t all, int thread, int threads) { return (range){all * thread / threads, all * (thread + 1) / threads}; }

/* out = x / root(mean(x^2) + eps) * weight (+ residual). n is a multiple of the vector's width. */
static void norm_row(const float *x, const float *weight, float eps, long n, const float *residual, float *out) {
    vf squares = {0};
    for (long i = 0; i < n; i += VW) squares += hx_load(x + i, HX_F32) * hx_load(x + i, HX_F32);
    const vf factor = hx_all(1.0f / sqrtf(hx_sum(squares) / (float)n + eps));
    for (long i = 0; i < n; i += VW) {
        vf value = hx_load(x + i, HX_F32) * factor * hx_load(weight + i, HX_F32);
        if (residual) value += hx_load(residual + i, HX_F32);
        hx_store(out + i, value, HX_F32);
    }
}

static void norm_rows(range rows, const float *x, const float *weight, float eps, long n, const float *residual, float *out) {
    for (long r = rows.from; r < rows.to; r++) norm_row(x + r * n, weight, eps, n, residual ? residual + r * n : 0, out + r * n);
}

typedef struct {
    const float *x, *weight;
    float *out;
    int64_t m, n;
    float eps;
} norms;

static void norm_part(void *given, int thread, int threads) {
    const norms *job = given;
    norm_rows(share(job->m, thread, threads), job->x, job->weight, job->eps, job->n, 0, job->out);
}

/* out[m, n]; n is a multiple of 16. */
HX_API void hx_norm_run(const float *x, const float *weight, double eps, int64_t m, int64_t n, float *out, int threads) {
    norms job = {x, weight, out, m, n, (float)eps};
    hx_team_run(m * n < 1 << 15 ? 1 : threads, norm_part, &job);
}

typedef struct {
    const hx_layer *layer;
    const float *x, *cosine, *sine, *attended;
    float *normed, *hidden, *out;
    int64_t m;
    meeting at;
} work;

/* The halves of a head turn against each other: (a, b) becomes (a cos - b sin, b cos + a sin). */
static void turn(float *head, const float *cosine, const float *sine, long dimension) {
    const long half = dimension / 2;
    for (long i = 0; i < half; i += VW) {
        const vf a = hx_load(head + i, HX_F32), b = hx_load(head + half + i, HX_F32);
        hx_store(head + i, a * hx_load(cosine + i, HX_F32) - b * hx_load(sine + i, HX_F32), HX_F32);
        hx_store(head + half + i, b * hx_load(cosine + half + i, HX_F32) + a * hx_load(sine + half + i, HX_F32), HX_F32);
    }
}

static void products(const hx_linear *linear, int thread, int threads, const float *x, long m, const float *residual, float *y) {
    const range panels = share((linear->n + PANEL - 1) / PANEL, thread, threads);
    hx_panels(linear, panels.from, panels.to, x, m, residual, y, linear->n);
}

static void before_part(void *given, int thread, int threads) {
    work *job = given;
    const hx_layer *layer = job->layer;
    const long width = layer->qkv.k, all = layer->qkv.n, d = layer->head_dim, turned = layer->heads + layer->kv_heads;
    norm_rows(share(job->m, thread, threads), job->x, layer->norm, layer->eps, width, 0, job->normed);
    meet(&job->at, threads);
    products(&layer->qkv, thread, threads, job->normed, job->m, 0, job->out);
    meet(&job->at, threads);
    const range mine = share(job->m * turned, thread, threads);
    for (long i = mine.from; i < mine.to; i++) {
        const long row = i / turned, which = i % turned;
        float *head = job->out + row * all + which * d;
        const float *weight = which < layer->heads ? layer->query_norm : layer->key_norm;
        if (weight) norm_row(head, weight, layer->eps, d, 0, head);
        turn(head, job->cosine + row * d, job->sine + row * d, d);
    }
}

/* out[m, q k v]; x [m, width]; cosine and sine [m, head_dim]; normed [m, width] is room. */
HX_API void hx_layer_before(const hx_layer *layer, const float *x, int64_t m, const float *cosine, const float *sine, float *normed,
                            float *out, int threads) {
    work job = {.layer = layer, .x = x, .cosine = cosine, .sine = sine, .normed = normed, .out = out, .m = m};
    hx_team_run(threads, before_part, &job);
}

HX_INLINE vf activated(vf x, const int kind) {
    if (kind == SILU) return x / (1.0f + hx_exp(hx_select((vi)(x < -88.0f), hx_all(88.0f), -x)));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + hx_tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    for (int i = 0; i < VW; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return x;
}

/* out[16] = act(both[0 .. 15]) * both[16 .. 31]. */
static void gate_columns(int64_t activation, const float *both, float *out) {
    for (long i = 0; i < PANEL; i += VW) {
        vf value = hx_load(both + i, HX_F32);
        if (activation == SILU) value = activated(value, SILU);
        else if (activation == GELU_TANH) value = activated(value, GELU_TANH);
        else value = activated(value, GELU);
        hx_store(out + i, value * hx_load(both + PANEL + i, HX_F32), HX_F32);
    }
}

/* act(gate) * up of some pairs of panels, as many at a time as there is room for. */
static void gated(const hx_layer *layer, range pairs, const float *x, long m, float *out) {
    const long k = layer->gate_up.k, inner = layer->down.k;
    float both[STRIPE * 2 * PANEL] __attribute__((aligned(64)));
    for (long row = 0; row < m; row += STRIPE) {
        const long rows = m - row < STRIPE ? m - row : STRIPE, most = STRIPE / rows;
        for (long pair = pairs.from; pair < pairs.to; pair += most) {
            const long count = pairs.to - pair < most ? pairs.to - pair : most, wide = count * 2 * PANEL;
            hx_linear some = layer->gate_up;
            some.packed += 2 * pair * some.stride;
            some.bias = some.bias ? some.bias + 2 * pair * PANEL : 0;
            some.n = wide;
            hx_panels(&some, 0, 2 * count, x + row * k, rows, 0, both, wide);
            for (long r = 0; r < rows; r++)
                for (long i = 0; i < count; i++)
                    gate_columns(layer->activation, both + r * wide + i * 2 * PANEL, out + (row + r) * inner + (pair + i) * PANEL);
        }
    }
}

static void after_part(void *given, int thread, int threads) {
    work *job = given;
    const hx_layer *layer = job->layer;
    const long width = layer->out.n, m = job->m;
    const range rows = share(m, thread, threads);
    products(&layer->out, thread, threads, job->attended, m, layer->attended_norm ? 0 : job->x, job->out);
    meet(&job->at, threads);
    if (layer->attended_norm) norm_rows(rows, job->out, layer->attended_norm, layer->eps, width, job->x, job->out);
    norm_rows(rows, job->out, layer->mlp_norm, layer->eps, width, 0, job->normed);
    meet(&job->at, threads);
    gated(layer, share(layer->down.k / PANEL, thread, threads), job->normed, m, job->hidden);
    meet(&job->at, threads);
    if (!layer->mlp_out_norm) {
        products(&layer->down, thread, threads, job->hidden, m, job->out, job->out);
        return;
    }
    products(&layer->down, thread, threads, job->hidden, m, 0, job->normed);
    meet(&job->at, threads);
    norm_rows(rows, job->normed, layer->mlp_out_norm, layer->eps, width, job->out, job->out);
}

/* out[m, width]; x, attended as before and after attention; room: m * (width + inner) floats. */
HX_API void hx_layer_after(const hx_layer *layer, const float *x, const float *attended, int64_t m, float *room, float *out, int threads) {
    work job = {.layer = layer, .x = x, .attended = attended, .normed = room, .hidden = room + m * layer->out.n, .out = out, .m = m};
    hx_team_run(threads, after_part, &job);
}
