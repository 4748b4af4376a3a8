/* What a machine does to every process of a world (world.py), preloaded into them: a disk that is slow, that the kernel has made
   read-only under open files (as ext4 does after an error; no mount can be told to), a source whose reads fail, a wall clock that
   was stepped, another boot id after a reboot. The switches lie in a page that the storm shares with us, so that they turn in the
   midst of a run. Only what Python, SQLite and kgorch call is stood in for.

   KGORCH_TEST_WEATHER: the page. KGORCH_TEST_DISK, KGORCH_TEST_SOURCE: path prefixes. KGORCH_TEST_BOOT: the boot id's file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

struct weather {
    int64_t slow_ms, read_only, source_fails, clock_s;
};
static volatile struct weather *now;
static const char *disk, *source, *boot;
static int has_clock; /* the supervisors' and daemons' alone: C++ condition variables of a rank would mix it with the kernel's */

static void *found(void **known, const char *name) {
    if (!*known) *known = dlsym(RTLD_NEXT, name);
    return *known;
}
#define REAL(name) ((__typeof__(name) *)found(&real_##name, #name))

/* Of the variable's value: a forked shim writes its own environment over that of its standby. */
static const char *copy_of(const char *name) {
    const char *value = getenv(name);
    return value ? strdup(value) : NULL;
}

__attribute__((constructor)) static void begin(void) {
    const char *page = getenv("KGORCH_TEST_WEATHER");
    int fd = page ? open(page, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    disk = copy_of("KGORCH_TEST_DISK"), source = copy_of("KGORCH_TEST_SOURCE"), boot = copy_of("KGORCH_TEST_BOOT");
    char line[4096] = "";
    fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    if (fd >= 0) close(fd);
    for (ssize_t at = 0; at < count; at += strlen(line + at) + 1)
        if (!strcmp(line + at, "kgorch.cli")) has_clock = 1;
    if (mapped != MAP_FAILED) now = mapped;
}

static int below(const char *path, const char *prefix) {
    return path && prefix && *prefix && !strncmp(path, prefix, strlen(prefix));
}

static int lies_on_disk(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path, disk);
}

static int refuses(const char *path) { return now && now->read_only && below(path, disk); }
static int refuses_fd(int fd) { return now && now->read_only && lies_on_disk(fd); }

static void linger(int fd) {
    if (now && now->slow_ms > 0 && lies_on_disk(fd)) usleep(now->slow_ms * 1000);
}

static int fail(int error) {
    errno = error;
    return -1;
}

static const char *meant(const char *path) {
    return now && boot && path && !strcmp(path, "/proc/sys/kernel/random/boot_id") ? boot : path;
}

static int opens_in_vain(const char *path, int flags) {
    if (now && now->source_fails && below(path, source)) return EIO;
    if (!refuses(path)) return 0;
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC);
    return writes || ((flags & O_CREAT) && access(path, F_OK)) ? EROFS : 0;
}

#define OPEN(name)                                                                                   \
    static void *real_##name;                                                                        \
    int name(const char *path, int flags, ...) {                                                     \
        va_list rest;                                                                                \
        va_start(rest, flags);                                                                       \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                       \
        va_end(rest);                                                                                \
        int error = opens_in_vain(path, flags);                                                      \
        return error ? fail(error) : REAL(name)(meant(path), flags, mode);                           \
    }
OPEN(open)
OPEN(open64)

static void *real_fsync, *real_fdatasync, *real_clock_gettime;
int fsync(int fd) {
    linger(fd);
    return refuses_fd(fd) ? fail(EROFS) : REAL(fsync)(fd);
}
int fdatasync(int fd) {
    linger(fd);
    return refuses_fd(fd) ? fail(EROFS) : REAL(fdatasync)(fd);
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int done = REAL(clock_gettime)(clock, at);
    if (!done && now && has_clock && clock == CLOCK_REALTIME) at->tv_sec += now->clock_s;
    return done;
}

#define REFUSED_FD(type, name, arguments, given)                                                     \
    static void *real_##name;                                                                        \
    type name arguments { return refuses_fd(fd) ? fail(EROFS) : REAL(name) given; }
REFUSED_FD(ssize_t, write, (int fd, const void *bytes, size_t count), (fd, bytes, count))
REFUSED_FD(ssize_t, pwrite64, (int fd, const void *bytes, size_t count, off64_t at), (fd, bytes, count, at))
REFUSED_FD(ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t count), (fd, from, at, count))
REFUSED_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))

#define REFUSED(name, arguments, given)                                                              \
    static void *real_##name;                                                                        \
    int name arguments { return refuses(path) ? fail(EROFS) : REAL(name) given; }
REFUSED(rename, (const char *path, const char *to), (path, to))
REFUSED(unlink, (const char *path), (path))
REFUSED(rmdir, (const char *path), (path))
REFUSED(mkdir, (const char *path, mode_t mode), (path, mode))
