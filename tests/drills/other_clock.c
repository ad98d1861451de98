/* A clock on the wall that is DRILL_CLOCK_SECONDS off, for programs that load this first (LD_PRELOAD).

   What counts from the machine's start (CLOCK_MONOTONIC) stays as it is. Waits that end at a time of the wall are put
   back to the real one; a time so small that it can only count from the machine's start is left alone, because a wait
   does not say which clock it goes by.

     cc -shared -fPIC -O2 -o other_clock.so other_clock.c
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

#define FIRST_OF_WALL 1000000000 /* 2001, or 31 years after a machine's start */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long offset(void) {
  static long seconds;
  static int known;
  if (!known) {
    const char *text = getenv("DRILL_CLOCK_SECONDS");
    seconds = text ? atol(text) : 0;
    known = 1;
  }
  return seconds;
}

static struct timespec real(const struct timespec *until) {
  struct timespec found = *until;
  if (found.tv_sec > FIRST_OF_WALL) found.tv_sec -= offset();
  return found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static __typeof__(&clock_gettime) next;
  if (!next) next = REAL(clock_gettime);
  int failed = next(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static __typeof__(&gettimeofday) next;
  if (!next) next = REAL(gettimeofday);
  int failed = next(now, zone);
  if (!failed) now->tv_sec += offset();
  return failed;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static __typeof__(&pthread_cond_timedwait) next;
  if (!next) next = REAL(pthread_cond_timedwait);
  struct timespec then = real(until);
  return next(cond, mutex, &then);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  static __typeof__(&pthread_mutex_timedlock) next;
  if (!next) next = REAL(pthread_mutex_timedlock);
  struct timespec then = real(until);
  return next(mutex, &then);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static __typeof__(&sem_timedwait) next;
  if (!next) next = REAL(sem_timedwait);
  struct timespec then = real(until);
  return next(semaphore, &then);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
  static __typeof__(&pthread_cond_clockwait) next;
  if (!next) next = REAL(pthread_cond_clockwait);
  struct timespec then = real(until);
  return next(cond, mutex, clock, &then);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
  static __typeof__(&sem_clockwait) next;
  if (!next) next = REAL(sem_clockwait);
  struct timespec then = real(until);
  return next(semaphore, clock, &then);
}
