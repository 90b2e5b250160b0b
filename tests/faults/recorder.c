/* A library to preload: every change below the folder RECORDED_ROOT is written to the file RECORDED_LOG, in order.

One record is a line, OPERATION, PATH, SECOND PATH, OFFSET and LENGTH apart by tabs, and then LENGTH bytes of data. */

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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static const char *root;

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("RECORDED_LOG");
    root = getenv("RECORDED_ROOT");
    if (log != NULL && root != NULL)
        log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int ours(const char *path) { return log_fd >= 0 && strncmp(path, root, strlen(root)) == 0; }

static void record(const char *what, const char *path, const char *other, off_t at, const void *data, size_t size) {
    char line[2 * PATH_MAX + 128];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%lld\t%zu\n", what, path, other, (long long)at, size);
    syscall(SYS_write, log_fd, line, length);
    if (size)
        syscall(SYS_write, log_fd, data, size);
}

/* The path of an open file, or of a name below an open folder; an empty one where it is not below the root. */
static int path_of(int folder, const char *name, char *path) {
    char link[64];
    ssize_t size = 0;
    path[0] = 0;
    if (name != NULL && (name[0] == '/' || folder == AT_FDCWD)) {
        if (name[0] != '/' && getcwd(path, PATH_MAX - 1) != NULL)
            strcat(path, "/");
        strncat(path, name, PATH_MAX - strlen(path) - 1);
        return ours(path);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    size = readlink(link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
    if (name != NULL) {
        strncat(path, "/", PATH_MAX - strlen(path) - 1);
        strncat(path, name, PATH_MAX - strlen(path) - 1);
    }
    return ours(path);
}

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int known = path_of(folder, name, path), there, made;
    if (!known || !(flags & (O_CREAT | O_TRUNC)))
        return syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    there = faccessat(folder, name, F_OK, 0) == 0;
    made = syscall(SYS_openat, folder, name, flags, mode);
    if (made >= 0 && (!there || (flags & O_TRUNC)))
        record(there ? "truncate" : "create", path, "", 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return made;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }

/* What follows is of one form: do it, and record it where it went well. */
#define RECORDED(type, call, known, done) \
    type got; \
    if (!(known)) \
        return call; \
    pthread_mutex_lock(&lock); \
    got = call; \
    if (got >= 0) { \
        int kept = errno; \
        done; \
        errno = kept; \
    } \
    pthread_mutex_unlock(&lock); \
    return got;

ssize_t write(int file, const void *data, size_t size) {
    char path[PATH_MAX];
    int known = path_of(file, NULL, path);
    off_t at = known ? lseek(file, 0, SEEK_CUR) : 0;
    RECORDED(ssize_t, syscall(SYS_write, file, data, size), known, record("write", path, "", at, data, got))
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    char path[PATH_MAX];
    RECORDED(ssize_t, syscall(SYS_pwrite64, file, data, size, at), path_of(file, NULL, path),
             record("write", path, "", at, data, got))
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { return pwrite(file, data, size, at); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    ssize_t all = 0;
    for (int part = 0; part < count; part++) {
        ssize_t size = write(file, parts[part].iov_base, parts[part].iov_len);
        if (size < 0)
            return all ? all : size;
        all += size;
    }
    return all;
}

int ftruncate(int file, off_t size) {
    char path[PATH_MAX];
    RECORDED(int, syscall(SYS_ftruncate, file, size), path_of(file, NULL, path), record("resize", path, "", size, NULL, 0))
}
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }

int fsync(int file) {
    char path[PATH_MAX];
    RECORDED(int, syscall(SYS_fsync, file), path_of(file, NULL, path), record("fsync", path, "", 0, NULL, 0))
}
int fdatasync(int file) {
    char path[PATH_MAX];
    RECORDED(int, syscall(SYS_fdatasync, file), path_of(file, NULL, path), record("fsync", path, "", 0, NULL, 0))
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int known = path_of(from, old, path) & path_of(to, new, other);
    RECORDED(int, syscall(SYS_linkat, from, old, to, new, flags), known, record("link", path, other, 0, NULL, 0))
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int known = path_of(from, old, path) & path_of(to, new, other);
    RECORDED(int, syscall(SYS_renameat2, from, old, to, new, flags), known, record("rename", path, other, 0, NULL, 0))
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    RECORDED(int, syscall(SYS_unlinkat, folder, name, flags), path_of(folder, name, path),
             record("unlink", path, "", 0, NULL, 0))
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    RECORDED(int, syscall(SYS_mkdirat, folder, name, mode), path_of(folder, name, path),
             record("mkdir", path, "", 0, NULL, 0))
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
