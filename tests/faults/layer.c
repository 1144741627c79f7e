// A layer between a process and the C library (LD_PRELOAD): it counts the calls that change files below some folders, and does
// something at one of them: kills the process, sends it a signal, refuses the call. It can write all of them to a log, from
// which power_loss.py makes the disks that a power failure may leave. It sleeps until faults_arm is called, and after a fork it
// stays as it is. Of a write that is refused or killed at, the first half takes effect, in whole blocks where the file is open
// for direct writes (O_DIRECT), past the page cache. It may count the direct writes of whole blocks alone.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { COUNT, KILL, REFUSE, SIGNAL, JUMP, BLOCK = 4096 };

static struct { int action, lasting, number, direct; long at; char roots[2][PATH_MAX]; int log; } plan = {.log = -1};
static volatile long calls = -1;                       // -1: asleep
static volatile long jumped_s = 0;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, #name)

void faults_arm(int action, long at, int lasting, int number, int direct, const char *root, const char *other, int log) {
    plan.action = action, plan.at = at, plan.lasting = lasting, plan.number = number, plan.direct = direct, plan.log = log;
    snprintf(plan.roots[0], PATH_MAX, "%s", root);
    snprintf(plan.roots[1], PATH_MAX, "%s", other);
    calls = 0;
}

long faults_calls(void) { return calls; }

static int below(const char *path) {
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(plan.roots[i]);
        if (length && !strncmp(path, plan.roots[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

// The absolute path of a descriptor, or of a name in a folder; "" where it is not below the folders.
static void whole(char *into, int folder, const char *name) {
    char base[PATH_MAX] = "", link[64];
    into[0] = 0;
    if (name && name[0] == '/') snprintf(into, PATH_MAX, "%s", name);
    else {
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return; }
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t got = readlink(link, base, sizeof base - 1);
            if (got < 0) return;
            base[got] = 0;
        }
        if (snprintf(into, PATH_MAX, name ? "%s/%s" : "%s", base, name) >= PATH_MAX) into[0] = 0;
    }
    if (!below(into)) into[0] = 0;
}

static int is_direct(int file) { int flags = fcntl(file, F_GETFL); return flags >= 0 && flags & O_DIRECT; }
static size_t half(int file, size_t bytes) { return is_direct(file) ? bytes / 2 / BLOCK * BLOCK : bytes / 2; }

// 0, the error with which this call is refused, or -1 where it kills.
static int due(const char *path, int frees, int direct) {
    if (calls < 0 || !path[0] || (plan.direct && !direct)) return 0;
    long here = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (here != plan.at && !(plan.lasting && here > plan.at && plan.at)) return 0;
    if (plan.action == SIGNAL) raise(plan.number);
    if (plan.action == JUMP) jumped_s = plan.number;
    if (plan.action == KILL) return -1;
    if (plan.action == REFUSE && !(frees && plan.number == ENOSPC)) return plan.number;      // a full disk deletes
    return 0;
}

static int refuse(int error) {
    if (error == -1) kill(getpid(), SIGKILL);
    errno = error;
    return -1;
}

struct record { char kind; uint64_t inode, offset; uint32_t first, second; };

static void note(char kind, uint64_t inode, uint64_t offset, const void *first, uint32_t first_bytes, const char *second) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (plan.log < 0 || calls < 0) return;
    struct record record = {kind, inode, offset, first_bytes, second ? strlen(second) : 0};
    real(plan.log, &record, sizeof record);
    real(plan.log, first, first_bytes);
    if (second) real(plan.log, second, record.second);
}

static void note_written(int file, const void *data, size_t bytes, off_t offset) {
    struct stat found;
    if (plan.log < 0 || fstat(file, &found)) return;
    note('w', found.st_ino, offset < 0 ? lseek(file, 0, SEEK_CUR) - bytes : offset, data, bytes, 0);
}

#define ON_FILE(call, direct, refused_half, done) \
    char path[PATH_MAX]; \
    if (calls < 0) return call; \
    whole(path, file, 0); \
    int error = due(path, 0, direct); \
    if (error) { refused_half; return refuse(error); } \
    if (!path[0] || plan.log < 0) return call; \
    pthread_mutex_lock(&lock); \
    __typeof__(call) result = call; \
    if (result >= 0) { done; } \
    pthread_mutex_unlock(&lock); \
    return result

ssize_t write(int file, const void *data, size_t bytes) {
    REAL(ssize_t, write, int, const void *, size_t);
    ON_FILE(real(file, data, bytes), bytes % BLOCK == 0 && is_direct(file), real(file, data, half(file, bytes)),
            note_written(file, data, result, -1));
}

ssize_t pwrite64(int file, const void *data, size_t bytes, off64_t offset) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    ON_FILE(real(file, data, bytes, offset), bytes % BLOCK == 0 && is_direct(file),
            real(file, data, half(file, bytes), offset), note_written(file, data, result, offset));
}
ssize_t pwrite(int file, const void *data, size_t bytes, off_t offset) { return pwrite64(file, data, bytes, offset); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    char path[PATH_MAX];
    if (calls < 0) return real(file, parts, count);
    whole(path, file, 0);
    if (!path[0]) return real(file, parts, count);
    for (int i = 0; i < count; i++) if (parts[i].iov_len) return write(file, parts[i].iov_base, parts[i].iov_len);
    return 0;
}

static uint64_t inode_of(int file) { struct stat found; return fstat(file, &found) ? 0 : found.st_ino; }

int fsync(int file) {
    REAL(int, fsync, int);
    ON_FILE(real(file), 0, (void)0, note('s', inode_of(file), 0, path, strlen(path), 0));
}

int fdatasync(int file) {
    REAL(int, fdatasync, int);
    ON_FILE(real(file), 0, (void)0, note('s', inode_of(file), 0, path, strlen(path), 0));
}

int ftruncate64(int file, off64_t bytes) {
    REAL(int, ftruncate64, int, off64_t);
    ON_FILE(real(file, bytes), 0, (void)0, note('t', inode_of(file), bytes, "", 0, 0));
}
int ftruncate(int file, off_t bytes) { return ftruncate64(file, bytes); }

#define ON_PATH(call, frees, done) \
    char path[PATH_MAX]; \
    if (calls < 0) return call; \
    whole(path, folder, name); \
    int error = due(path, frees, 0); \
    if (error) return refuse(error); \
    if (!path[0] || plan.log < 0) return call; \
    pthread_mutex_lock(&lock); \
    struct stat found = {0}; \
    int result = call; \
    if (result >= 0) { lstat(path, &found); done; } \
    pthread_mutex_unlock(&lock); \
    return result

int truncate64(const char *name, off64_t bytes) {
    REAL(int, truncate64, const char *, off64_t);
    int folder = AT_FDCWD;
    ON_PATH(real(name, bytes), 0, note('t', found.st_ino, bytes, "", 0, 0));
}
int truncate(const char *name, off_t bytes) { return truncate64(name, bytes); }

int mkdirat(int folder, const char *name, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    ON_PATH(real(folder, name, mode), 0, note('d', found.st_ino, 0, path, strlen(path), 0));
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int folder, const char *name, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    ON_PATH(real(folder, name, flags), 1, note('u', 0, 0, path, strlen(path), 0));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int renameat(int from, const char *old, int folder, const char *name) {
    REAL(int, renameat, int, const char *, int, const char *);
    char source[PATH_MAX];
    if (calls >= 0) whole(source, from, old);
    ON_PATH(real(from, old, folder, name), 0, note('r', 0, 0, source, strlen(source), path));
}
int rename(const char *old, const char *name) { return renameat(AT_FDCWD, old, AT_FDCWD, name); }

static int opened(int folder, const char *name, int flags, mode_t mode) {
    REAL(int, openat64, int, const char *, int, ...);
    if (calls < 0 || !(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))) return real(folder, name, flags, mode);
    char at[PATH_MAX];
    struct stat before;
    whole(at, folder, name);
    int is_new = at[0] && lstat(at, &before);
    ON_PATH(real(folder, name, flags, mode), 0,
            note(is_new ? 'c' : 'o', found.st_ino, flags & O_TRUNC, path, strlen(path), 0));
}

#define MODE mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode); }

// while awake no copies within the kernel, so that every byte comes by write
ssize_t sendfile64(int to, int from, off64_t *offset, size_t bytes) {
    REAL(ssize_t, sendfile64, int, int, off64_t *, size_t);
    if (calls < 0) return real(to, from, offset, bytes);
    errno = ENOTSOCK;
    return -1;
}
ssize_t sendfile(int to, int from, off_t *offset, size_t bytes) { return sendfile64(to, from, offset, bytes); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, clock_gettime, clockid_t, struct timespec *);
    int result = real(clock, now);
    if (!result && clock == CLOCK_REALTIME) now->tv_sec += jumped_s;
    return result;
}
