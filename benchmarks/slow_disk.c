/* A disk of a chosen speed below one folder, preloaded into every process of a session (walls.py): each write waits its turn at the
   one disk that all of them share, as long as its bytes take there, and each flush a while besides. The speed lies in a page of
   shared memory, so that it changes in the midst of a session.

   SLOW_DISK_PAGE: the page. SLOW_DISK_BELOW: the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

struct disk {
    int64_t ns_per_mb, flush_ns, free_at_ns; /* the last: CLOCK_MONOTONIC, when what is queued is through */
};
static volatile struct disk *disk;
static const char *below;

__attribute__((constructor)) static void begin(void) {
    const char *page = getenv("SLOW_DISK_PAGE");
    int fd = page ? open(page, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    below = getenv("SLOW_DISK_BELOW");
    if (mapped != MAP_FAILED && below) disk = mapped;
}

static int lies_there(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return !strncmp(path, below, strlen(below));
}

static void queue_up(int64_t cost_ns) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int64_t now = at.tv_sec * 1000000000LL + at.tv_nsec, busy = disk->free_at_ns, through;
    do through = (busy > now ? busy : now) + cost_ns;
    while (!__atomic_compare_exchange_n(&disk->free_at_ns, &busy, through, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    at.tv_sec = through / 1000000000LL, at.tv_nsec = through % 1000000000LL;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL)) {}
}

#define SLOW(type, name, arguments, given, cost)                                                    \
    type name arguments {                                                                            \
        static type(*real) arguments;                                                                \
        if (!real) real = (type(*) arguments)dlsym(RTLD_NEXT, #name);                                \
        if (disk && disk->ns_per_mb && lies_there(fd)) queue_up(cost);                               \
        return real given;                                                                           \
    }
#define BYTES ((int64_t)((double)count * disk->ns_per_mb / 1e6))
SLOW(ssize_t, write, (int fd, const void *bytes, size_t count), (fd, bytes, count), BYTES)
SLOW(ssize_t, pwrite64, (int fd, const void *bytes, size_t count, off64_t at), (fd, bytes, count, at), BYTES)
SLOW(ssize_t, sendfile, (int fd, int from, off_t *at, size_t count), (fd, from, at, count), BYTES)
SLOW(ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t count), (fd, from, at, count), BYTES)
SLOW(int, fsync, (int fd), (fd), disk->flush_ns)
SLOW(int, fdatasync, (int fd), (fd), disk->flush_ns)
