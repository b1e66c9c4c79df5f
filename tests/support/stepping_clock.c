/* A wall clock that steps: preloaded into a process, it adds an offset to what the process is told the time of day is.

   The offset, a number of whole seconds as int64, is read from the file that STEPPING_CLOCK names, at every call: whoever writes
   into the file sets the clocks of all processes that were started with it. The monotonic clock is left alone, as it is by a
   step of the real clock. Waits until a time of day get their deadline in the kernel's time, and so last as long as was meant. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_of_all;

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("STEPPING_CLOCK");
  int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *place = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (place != MAP_FAILED) offset_of_all = place;
}

static int64_t offset(void) { return offset_of_all == NULL ? 0 : *offset_of_all; }

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static struct timespec of_kernel(const struct timespec *deadline) {
  struct timespec at = *deadline;
  at.tv_sec -= offset();
  if (at.tv_sec < 0) at.tv_sec = 0;
  return at;
}

/* The next definition of a function, usually glibc's; looked up once for each caller. */
#define NEXT(name)                  \
  static __typeof__(name) *next;    \
  if (next == NULL) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
  NEXT(clock_gettime);
  int code = next(clock, now);
  if (code == 0 && is_wall(clock)) now->tv_sec += offset();
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  NEXT(gettimeofday);
  int code = next(now, zone);
  if (code == 0) now->tv_sec += offset();
  return code;
}

time_t time(time_t *now) {
  NEXT(time);
  time_t told = next(NULL) + offset();
  if (now != NULL) *now = told;
  return told;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left) {
  NEXT(clock_nanosleep);
  if (!is_wall(clock) || !(flags & TIMER_ABSTIME)) return next(clock, flags, wanted, left);
  struct timespec at = of_kernel(wanted);
  return next(clock, flags, &at, left);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  NEXT(sem_timedwait);
  struct timespec at = of_kernel(deadline);
  return next(semaphore, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
  NEXT(pthread_mutex_timedlock);
  struct timespec at = of_kernel(deadline);
  return next(mutex, &at);
}

int pthread_cond_clockwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock, const struct timespec *restrict deadline) {
  NEXT(pthread_cond_clockwait);
  struct timespec at = is_wall(clock) ? of_kernel(deadline) : *deadline;
  return next(condition, mutex, clock, &at);
}

/* The clock of a condition variable is set when it is made, and cannot be asked for. A deadline that is more than a year ahead of
   the monotonic clock, which counts from the start of the machine, is one of the wall clock, which counts from 1970. */
int pthread_cond_timedwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
  static __typeof__(pthread_cond_timedwait) *next;
  if (next == NULL) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* the older one of x86-64 takes another struct */
  if (next == NULL) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec up;
  clock_gettime(CLOCK_MONOTONIC, &up);
  struct timespec at = deadline->tv_sec > up.tv_sec + 365 * 86400 ? of_kernel(deadline) : *deadline;
  return next(condition, mutex, &at);
}

/* Libraries that lock by futex(2) themselves, as absl does, may give it a time of day. */
long syscall(long number, ...) {
  NEXT(syscall);
  __builtin_va_list list;
  long a[6];
  __builtin_va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = __builtin_va_arg(list, long);
  __builtin_va_end(list);
  const int asks = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
  if (number == SYS_futex && (a[1] & ~FUTEX_PRIVATE_FLAG) == asks && a[3] != 0) {
    struct timespec at = of_kernel((const struct timespec *)a[3]);
    return next(number, a[0], a[1], a[2], (long)&at, a[4], a[5]);
  }
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
