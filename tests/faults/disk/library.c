/* A library to preload: it sees every change below one folder. It records the changes, or it makes some of them fail.

Recording: every change below the folder RECORDED_ROOT is written to the file RECORDED_LOG, in order. One record is a
line, OPERATION, PATH, SECOND PATH, OFFSET and LENGTH apart by tabs, and then LENGTH bytes of data.

Failing: a process calls fail() with a folder, how changes fail there, and which. From then on they are counted, a file
that is opened to be written being one too. Changes of files whose path contains a given text are let alone.

Listing: after hide(), the next listings of folders lack one name, as of a file that comes while a folder is listed.

The clock: after set_clock() the time of day is another one, and may go back. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    NOTHING,
    COUNTED,   /* nothing fails */
    KILLED,    /* the process is killed instead of one change */
    HALF,      /* it is killed after one change; where this is a write, after half of it */
    FULL,      /* from one change on the disk is full: half of this write is done, and nothing grows afterwards */
    BROKEN,    /* one change fails: EIO */
    READ_ONLY, /* every change fails: EROFS */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static char root[PATH_MAX], except[PATH_MAX];
static int how = NOTHING;
static long failing, calls;
static __thread long call; /* the number of this thread's last change */
static char kinds[1 << 16];  /* what each change is, while nothing fails: a write, other growth, or neither */

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("RECORDED_LOG"), *folder = getenv("RECORDED_ROOT");
    if (log == NULL || folder == NULL)
        return;
    snprintf(root, sizeof root, "%s", folder);
    log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void fail(const char *folder, const char *let_alone, int kind, long at) {
    snprintf(root, sizeof root, "%s", folder);
    snprintf(except, sizeof except, "%s", let_alone);
    calls = 0;
    failing = at;
    how = kind;
}

long counted(void) { return calls; }

const char *counted_kinds(void) { return kinds; }

static int ours(const char *path) {
    if ((log_fd < 0 && how == NOTHING) || strncmp(path, root, strlen(root)) != 0)
        return 0;
    return !*except || strstr(path, except) == NULL;
}

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;)
        pause();
}

/* Count a change; return the error that it fails with, 0 where it is to be done. */
static int refusal(int grows) {
    if (how == NOTHING)
        return 0;
    if (how == READ_ONLY)
        return EROFS;
    call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (how == COUNTED && call < (long)sizeof kinds)
        kinds[call - 1] = grows ? 'g' : '-';
    if (how == KILLED && call == failing)
        die();
    if (how == BROKEN && call == failing)
        return EIO;
    return how == FULL && call >= failing && grows ? ENOSPC : 0;
}

/* How much of a write is done. */
static int written(size_t *size) {
    int refused = refusal(1);
    if (how == COUNTED && *size > 1 && call < (long)sizeof kinds)
        kinds[call - 1] = 'w';
    if ((how == HALF || how == FULL) && call == failing && *size > 1) {
        *size /= 2;
        return 0;
    }
    return refused;
}

static void record(const char *what, const char *path, const char *other, off_t at, const void *data, size_t size) {
    char line[2 * PATH_MAX + 128];
    int length;
    if (log_fd < 0)
        return;
    length = snprintf(line, sizeof line, "%s\t%s\t%s\t%lld\t%zu\n", what, path, other, (long long)at, size);
    syscall(SYS_write, log_fd, line, length);
    if (size)
        syscall(SYS_write, log_fd, data, size);
}

/* The path of an open file, or of a name below an open folder; whether it is one that is looked at. */
static int path_of(int folder, const char *name, char *path) {
    char link[64];
    ssize_t size = 0;
    path[0] = 0;
    if (log_fd < 0 && how == NOTHING)
        return 0;
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

static int there(int folder, const char *name) { return syscall(SYS_faccessat, folder, name, F_OK) == 0; }

static int failed(int error) {
    errno = error;
    return -1;
}

static void done(void) {
    if (how == HALF && call == failing)
        die();
}

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int known, before, made, refused, changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);
    if (!changes || !path_of(folder, name, path))
        return syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    before = there(folder, name);
    known = before && (flags & O_CREAT) && (flags & O_EXCL);
    refused = known ? EEXIST : refusal(!before);
    made = refused ? failed(refused) : (int)syscall(SYS_openat, folder, name, flags, mode);
    if (made >= 0 && (flags & (O_CREAT | O_TRUNC)) && (!before || (flags & O_TRUNC)))
        record(before ? "truncate" : "create", path, "", 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    if (made >= 0)
        done();
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

/* What follows is of one form: do it unless it is to fail, and record it where it went well. */
#define CHANGED(type, change, known, refused, recorded) \
    type got; \
    int error; \
    if (!(known)) \
        return change; \
    pthread_mutex_lock(&lock); \
    error = refused; \
    got = error ? failed(error) : change; \
    if (got >= 0) { \
        int kept = errno; \
        recorded; \
        errno = kept; \
    } \
    pthread_mutex_unlock(&lock); \
    if (!error) \
        done(); \
    return got;

ssize_t write(int file, const void *data, size_t size) {
    char path[PATH_MAX];
    int known = path_of(file, NULL, path);
    off_t at = known ? lseek(file, 0, SEEK_CUR) : 0;
    CHANGED(ssize_t, syscall(SYS_write, file, data, size), known, written(&size), record("write", path, "", at, data, got))
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    char path[PATH_MAX];
    CHANGED(ssize_t, syscall(SYS_pwrite64, file, data, size, at), path_of(file, NULL, path), written(&size),
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
        if ((size_t)size < parts[part].iov_len)
            break;
    }
    return all;
}

int ftruncate(int file, off_t size) {
    char path[PATH_MAX];
    CHANGED(int, syscall(SYS_ftruncate, file, size), path_of(file, NULL, path), refusal(size > 0),
            record("resize", path, "", size, NULL, 0))
}
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }

/* Where changes fail, no power is cut; and a read-only disk has nothing to write. */
static int synced(long call, int file) { return how == NOTHING ? (int)syscall(call, file) : 0; }
static int unsynced(void) { return how == READ_ONLY ? 0 : refusal(0); }

int fsync(int file) {
    char path[PATH_MAX];
    CHANGED(int, synced(SYS_fsync, file), path_of(file, NULL, path), unsynced(), record("fsync", path, "", 0, NULL, 0))
}
int fdatasync(int file) {
    char path[PATH_MAX];
    CHANGED(int, synced(SYS_fdatasync, file), path_of(file, NULL, path), unsynced(),
            record("fsync", path, "", 0, NULL, 0))
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int known = path_of(from, old, path) & path_of(to, new, other);
    CHANGED(int, syscall(SYS_linkat, from, old, to, new, flags), known, there(to, new) ? EEXIST : refusal(1),
            record("link", path, other, 0, NULL, 0))
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int known = path_of(from, old, path) & path_of(to, new, other);
    CHANGED(int, syscall(SYS_renameat2, from, old, to, new, flags), known, refusal(0),
            record("rename", path, other, 0, NULL, 0))
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    CHANGED(int, syscall(SYS_unlinkat, folder, name, flags), path_of(folder, name, path),
            there(folder, name) ? refusal(0) : ENOENT, record("unlink", path, "", 0, NULL, 0))
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    CHANGED(int, syscall(SYS_mkdirat, folder, name, mode), path_of(folder, name, path),
            there(folder, name) ? EEXIST : refusal(1), record("mkdir", path, "", 0, NULL, 0))
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

static long long clock_offset, clock_back; /* nanoseconds: added to the time, and taken from it at each look */
static long looks;

void set_clock(double seconds, double back) {
    clock_offset = (long long)(seconds * 1e9);
    clock_back = (long long)(back * 1e9);
    looks = 0;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    long long now;
    int got = syscall(SYS_clock_gettime, clock, time);
    if (got == 0 && clock == CLOCK_REALTIME && (clock_offset || clock_back)) {
        now = time->tv_sec * 1000000000LL + time->tv_nsec + clock_offset;
        now -= clock_back * __atomic_add_fetch(&looks, 1, __ATOMIC_SEQ_CST);
        time->tv_sec = now / 1000000000LL;
        time->tv_nsec = now % 1000000000LL;
    }
    return got;
}

static char hidden[NAME_MAX + 1];
static int hidings; /* how often the name is still to be left out */

void hide(const char *name, int times) {
    snprintf(hidden, sizeof hidden, "%s", name);
    hidings = times;
}

int hiding(void) { return hidings; }

struct dirent64 *readdir64(DIR *folder) {
    static struct dirent64 *(*next)(DIR *) = NULL;
    struct dirent64 *found;
    if (next == NULL)
        next = (struct dirent64 *(*)(DIR *))dlsym(RTLD_NEXT, "readdir64");
    found = next(folder);
    if (found == NULL || __atomic_load_n(&hidings, __ATOMIC_SEQ_CST) <= 0 || strcmp(found->d_name, hidden) != 0)
        return found;
    __atomic_sub_fetch(&hidings, 1, __ATOMIC_SEQ_CST);
    return next(folder);
}
struct dirent *readdir(DIR *folder) { return (struct dirent *)readdir64(folder); }
