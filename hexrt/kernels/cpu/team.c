/* Owns the three entries of the OpenMP runtime that `native.py` lends. GCC's names: LLVM's and Intel's runtimes have them too. */
#include "team.h"

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*number_fn)(void);

static parallel_fn run_parallel;
static number_fn thread_number, thread_count;

typedef struct {
    hx_body body;
    void *argument;
} piece;

HX_API void hx_team_lend(void *parallel, void *number, void *count) {
    run_parallel = (parallel_fn)parallel;
    thread_number = (number_fn)number;
    thread_count = (number_fn)count;
}

static void enter(void *given) {
    const piece *work = given;
    work->body(work->argument, thread_number(), thread_count());
}

void hx_team_run(int threads, hx_body body, void *argument) {
    if (threads <= 1 || !run_parallel) {
        body(argument, 0, 1);
        return;
    }
    piece work = {body, argument};
    run_parallel(enter, &work, (unsigned)threads, 0);
}
