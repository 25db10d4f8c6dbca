/* Threads of a kernel: those of the OpenMP runtime that the process already has, so that its pool is shared and never doubled. */
#ifndef HEXRT_TEAM_H
#define HEXRT_TEAM_H

#include <stdint.h>

#define HX_API __attribute__((visibility("default")))
#ifndef HX_INLINE
#define HX_INLINE static inline __attribute__((always_inline))
#endif

/* Work of thread `thread` of `threads`; how many there are is known here only, it may be fewer than were asked for. */
typedef void (*hx_body)(void *argument, int thread, int threads);

/* Runs `body` on up to `threads` threads, this one among them, and returns when all are done. With one thread, or where no runtime was
   lent, `body` runs here. Not to be called from a body. */
void hx_team_run(int threads, hx_body body, void *argument);

/* The next piece of work, for a counter that starts at 0 and is shared by the threads of a team. */
HX_INLINE int64_t hx_next(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

#endif
