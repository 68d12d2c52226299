/*
A library for LD_PRELOAD that makes calls of the operating system fail.

Only files below the folder that the environment variable FAULT_FOLDER names are concerned. Calls are counted by kind.
`fault_set` chooses the kind, the number of the call that fails (1 is the next one), its error, and whether later calls
of that kind fail, too. With the error SHORT, write and pwrite store half of the bytes, as on a disk that becomes full;
later calls then fail with ENOSPC if `sticky` is 1.

Calls that the C library makes itself, as fflush does, are not seen.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE, PWRITE, FSYNC, RENAME, LINK, UNLINK, FALLOCATE, TRUNCATE, PREAD, READ, OPEN, CREATE, MKDIR, KINDS };
#define SHORT (-1)

static struct { int kind, number, error, sticky; } fault = {-1, 0, 0, 0};
static int counts[KINDS];
static int hits;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void fault_set(int kind, int number, int error, int sticky) {
    memset(counts, 0, sizeof counts);
    hits = 0;
    fault.number = number, fault.error = error, fault.sticky = sticky;
    fault.kind = kind;
}

int fault_count(int kind) { return counts[kind]; }

int fault_hits(void) { return hits; }

static int is_below(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* The error of this call, or 0. */
static int now(enum kind kind, const char *path) {
    int error = 0;
    if (!is_below(path)) return 0;
    pthread_mutex_lock(&mutex);
    counts[kind]++;
    if (fault.kind == (int)kind && (counts[kind] == fault.number || (fault.sticky && counts[kind] > fault.number))) {
        error = fault.error;
        if (error == SHORT && counts[kind] > fault.number) error = ENOSPC;
        hits++;
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

static int now_descriptor(enum kind kind, int descriptor) {
    char link[40], path[PATH_MAX];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (length < 0) return 0;
    path[length] = 0;
    return now(kind, path);
}

/* A path relative to a folder's descriptor. */
static int now_at(enum kind kind, int folder, const char *path) {
    char link[40], whole[2 * PATH_MAX];
    if (!path) return 0;
    if (path[0] == '/') return now(kind, path);
    int kept = errno;
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    errno = kept;
    if (length < 0) return 0;
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return now(kind, whole);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define FAIL(call) do { int error = call; if (error) { errno = error; return -1; } } while (0)

#define PUT(name, KIND, DECLARED, TYPES, ...) \
    ssize_t name DECLARED { \
        REAL(ssize_t, name, TYPES); \
        int error = now_descriptor(KIND, file); \
        if (error == SHORT) size = size > 1 ? size / 2 : size; \
        else if (error) { errno = error; return -1; } \
        return real(__VA_ARGS__); \
    }
#define COMMA ,
PUT(write, WRITE, (int file, const void *bytes, size_t size), int COMMA const void * COMMA size_t, file, bytes, size)
PUT(pwrite, PWRITE, (int file, const void *bytes, size_t size, off_t at),
    int COMMA const void * COMMA size_t COMMA off_t, file, bytes, size, at)
PUT(pwrite64, PWRITE, (int file, const void *bytes, size_t size, off64_t at),
    int COMMA const void * COMMA size_t COMMA off64_t, file, bytes, size, at)

#define ON_FILE(type, name, KIND, DECLARED, TYPES, ...) \
    type name DECLARED { \
        REAL(type, name, TYPES); \
        FAIL(now_descriptor(KIND, file)); \
        return real(__VA_ARGS__); \
    }
ON_FILE(ssize_t, writev, WRITE, (int file, const struct iovec *parts, int n), int COMMA const struct iovec * COMMA int,
        file, parts, n)
ON_FILE(ssize_t, read, READ, (int file, void *bytes, size_t size), int COMMA void * COMMA size_t, file, bytes, size)
ON_FILE(ssize_t, pread, PREAD, (int file, void *bytes, size_t size, off_t at),
        int COMMA void * COMMA size_t COMMA off_t, file, bytes, size, at)
ON_FILE(ssize_t, pread64, PREAD, (int file, void *bytes, size_t size, off64_t at),
        int COMMA void * COMMA size_t COMMA off64_t, file, bytes, size, at)
ON_FILE(int, fsync, FSYNC, (int file), int, file)
ON_FILE(int, fdatasync, FSYNC, (int file), int, file)
ON_FILE(int, ftruncate, TRUNCATE, (int file, off_t size), int COMMA off_t, file, size)
ON_FILE(int, ftruncate64, TRUNCATE, (int file, off64_t size), int COMMA off64_t, file, size)
ON_FILE(int, fallocate, FALLOCATE, (int file, int mode, off_t at, off_t size), int COMMA int COMMA off_t COMMA off_t,
        file, mode, at, size)
ON_FILE(int, fallocate64, FALLOCATE, (int file, int mode, off64_t at, off64_t size),
        int COMMA int COMMA off64_t COMMA off64_t, file, mode, at, size)

int posix_fallocate(int file, off_t at, off_t size) {
    REAL(int, posix_fallocate, int, off_t, off_t);
    int error = now_descriptor(FALLOCATE, file);
    return error ? error : real(file, at, size);
}
int posix_fallocate64(int file, off64_t at, off64_t size) {
    REAL(int, posix_fallocate64, int, off64_t, off64_t);
    int error = now_descriptor(FALLOCATE, file);
    return error ? error : real(file, at, size);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    FAIL(now_at(RENAME, AT_FDCWD, from));
    return real(from, to);
}
int renameat(int folder, const char *from, int other, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    FAIL(now_at(RENAME, folder, from));
    return real(folder, from, other, to);
}
int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    FAIL(now_at(LINK, AT_FDCWD, from));
    return real(from, to);
}
int linkat(int folder, const char *from, int other, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    FAIL(now_at(LINK, folder, from));
    return real(folder, from, other, to, flags);
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    FAIL(now_at(UNLINK, AT_FDCWD, path));
    return real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    FAIL(now_at(UNLINK, folder, path));
    return real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    FAIL(now_at(UNLINK, AT_FDCWD, path));
    return real(path);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    FAIL(now_at(MKDIR, AT_FDCWD, path));
    return real(path, mode);
}

#define IS_NEW(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR))
#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        FAIL(now_at(IS_NEW(flags) ? CREATE : OPEN, AT_FDCWD, path)); \
        return real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        FAIL(now_at(IS_NEW(flags) ? CREATE : OPEN, folder, path)); \
        return real(folder, path, flags, mode); \
    }
OPENS_AT(openat)
OPENS_AT(openat64)
