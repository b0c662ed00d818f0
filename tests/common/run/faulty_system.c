/* Preloaded into every process of a run: counts the calls of each kind, and lets one of them, or all from it
   on, fail. FAULT_KIND: write, fsync, rename, allocate; FAULT_AT: the number of the call that fails, from 1;
   FAULT_ERRNO: its error; FAULT_LASTS: 1 for all from it on; FAULT_COUNT: a file that all processes share, with
   the number of calls of each kind, 8 bytes each; FAULT_BELOW: only files below this folder count; FAULT_TOLD: a file that is
   made when a call has failed. Allocations count where they are large, in a process that trains. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define LARGE (64 * 1024)

static const char *const KINDS[] = {"write", "fsync", "rename", "allocate"};
enum kind { WRITE, FSYNC, RENAME, ALLOCATE, NUM_KINDS };

static const char *kind = "", *below = "";
static int trains = 0;
static long fails_at = 0;
static int number_of_error = EIO, lasts = 0;
static uint64_t *count = NULL;
static __thread int is_inside = 0;

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("FAULT_COUNT");
    int file = text ? open(text, O_RDWR) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, 8 * NUM_KINDS, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    kind = getenv("FAULT_KIND");
    below = getenv("FAULT_BELOW");
    fails_at = atol(getenv("FAULT_AT"));
    number_of_error = atoi(getenv("FAULT_ERRNO"));
    lasts = atoi(getenv("FAULT_LASTS"));
    char command[4096];
    int line = open("/proc/self/cmdline", O_RDONLY);
    ssize_t length = read(line, command, sizeof command);
    close(line);
    trains = length > 0 && memmem(command, length, "common.run.worker", 17) != NULL;
    if (memory != MAP_FAILED) count = memory;
}

static int fails(enum kind called) {
    if (count == NULL || is_inside) return 0;
    long number = __sync_add_and_fetch(count + called, 1);
    if (strcmp(kind, KINDS[called]) != 0) return 0;
    if (fails_at == 0 || number < fails_at || (number > fails_at && !lasts)) return 0;
    is_inside = 1;
    const char *told = getenv("FAULT_TOLD");
    int file = told ? open(told, O_CREAT | O_WRONLY, 0644) : -1;
    if (file >= 0) close(file);
    is_inside = 0;
    errno = number_of_error;
    return 1;
}

static int is_below(const char *path) { return strncmp(path, below, strlen(below)) == 0; }

static int counts(int descriptor) {
    char link[64], path[4096];
    if (count == NULL || is_inside) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_below(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int descriptor, const void *data, size_t length) {
    return counts(descriptor) && fails(WRITE) ? -1 : REAL(write)(descriptor, data, length);
}

ssize_t writev(int descriptor, const struct iovec *data, int number) {
    return counts(descriptor) && fails(WRITE) ? -1 : REAL(writev)(descriptor, data, number);
}

ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t offset) {
    return counts(descriptor) && fails(WRITE) ? -1 : REAL(pwrite64)(descriptor, data, length, offset);
}

ssize_t pwrite(int descriptor, const void *data, size_t length, off_t offset) {
    return counts(descriptor) && fails(WRITE) ? -1 : REAL(pwrite)(descriptor, data, length, offset);
}

int ftruncate64(int descriptor, off64_t length) {
    return counts(descriptor) && fails(WRITE) ? -1 : REAL(ftruncate64)(descriptor, length);
}

int fsync(int descriptor) { return counts(descriptor) && fails(FSYNC) ? -1 : REAL(fsync)(descriptor); }

int rename(const char *old, const char *new) {
    return is_below(new) && fails(RENAME) ? -1 : REAL(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    return is_below(new) && fails(RENAME) ? -1 : REAL(renameat)(from, old, to, new);
}

int posix_memalign(void **memory, size_t alignment, size_t size) { /* torch's tensors */
    if (trains && size >= LARGE && fails(ALLOCATE)) return ENOMEM;
    return REAL(posix_memalign)(memory, alignment, size);
}
