// Preloaded into a process (LD_PRELOAD): counts the calls that change files below some folders, and at one of them
// fails with a chosen error or kills the process. The file named by KTC_FAULTS is mapped by every process of a run and
// holds what to do and what was done, so that child processes count on and a driver reads the result after any end.
// Its layout is `Control`, which faults.py writes and reads.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

enum Kind : uint32_t {
  kOpenForReading = 1,  // only these and the next run out of descriptors
  kOpenForWriting = 2,
  kWrite = 4,
  kFlush = 8,
  kName = 16,  // rename, mkdir, link, symlink
  kRemove = 32,
};

struct Control {
  uint64_t at;         // number of the call that fails, counted from 1; 0: only count
  uint64_t count;      // calls of the chosen kinds so far
  uint64_t injected;   // faults so far
  int32_t error;       // errno to fail with; 0: kill
  uint32_t lasting;    // every call from `at` on fails
  uint32_t kinds;      // which kinds of calls count
  uint32_t victim;     // process to kill; 0: the calling one
  char folders[4096];  // absolute paths, separated by newlines
  char where[1024];    // the first call that failed: its name and path
};

Control* control() {
  static Control* mapped = [] {
    const char* path = getenv("KTC_FAULTS");
    if (path == nullptr) return static_cast<Control*>(nullptr);
    // the real calls, because this must count nothing
    const auto real_open = reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"));
    const int descriptor = real_open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return static_cast<Control*>(nullptr);
    void* at = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    return at == MAP_FAILED ? nullptr : static_cast<Control*>(at);
  }();
  return mapped;
}

bool below(const char* path) {
  for (const char* folder = control()->folders; *folder != '\0';) {
    const size_t length = strcspn(folder, "\n");
    if (length > 0 && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == '\0')) {
      return true;
    }
    folder += length + (folder[length] == '\n');
  }
  return false;
}

bool path_of_descriptor(int descriptor, char* out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, out, PATH_MAX - 1);
  if (length <= 0) return false;
  out[length] = '\0';
  return true;
}

// Writes the absolute path, as it is spelt, without following links.
bool absolute(int folder, const char* path, char* out) {
  if (path == nullptr) return false;
  if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
    return true;
  }
  char base[PATH_MAX];
  if (folder == AT_FDCWD ? getcwd(base, sizeof base) == nullptr : !path_of_descriptor(folder, base)) return false;
  return snprintf(out, PATH_MAX, "%s/%s", base, path) < PATH_MAX;
}

// Counts a call on an absolute path. Returns true, with errno set, if the call is to fail.
bool fails_at(Kind kind, const char* name, const char* path) {
  Control* const c = control();
  if ((c->kinds & kind) == 0 || !below(path)) return false;
  const uint64_t number = __atomic_add_fetch(&c->count, 1, __ATOMIC_SEQ_CST);
  if (c->at == 0 || (c->lasting ? number < c->at : number != c->at)) return false;
  if (__atomic_add_fetch(&c->injected, 1, __ATOMIC_SEQ_CST) == 1) {
    snprintf(c->where, sizeof c->where, "%s %s", name, path);
  }
  if (c->error <= 0) {  // a signal, and a call that succeeds if the process goes on
    kill(c->victim != 0 ? static_cast<pid_t>(c->victim) : getpid(), c->error == 0 ? SIGKILL : -c->error);
    return false;
  }
  errno = c->error;
  return true;
}

bool fails(Kind kind, const char* name, int folder, const char* path) {
  if (control() == nullptr) return false;
  const int before = errno;
  char whole[PATH_MAX];
  if (absolute(folder, path, whole) && fails_at(kind, name, whole)) return true;
  errno = before;
  return false;
}

bool fails(Kind kind, const char* name, int descriptor) {
  if (control() == nullptr || (control()->kinds & kind) == 0) return false;
  const int before = errno;
  char whole[PATH_MAX];
  if (path_of_descriptor(descriptor, whole) && fails_at(kind, name, whole)) return true;
  errno = before;
  return false;
}

Kind kind_of_open(int flags) {
  return (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0 ? kOpenForWriting : kOpenForReading;
}

Kind kind_of_mode(const char* mode) {
  return strpbrk(mode, "wa+") != nullptr ? kOpenForWriting : kOpenForReading;
}

template <typename Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// Calls the function that this one stands before.
#define REAL(name)                                  \
  ([] {                                             \
    static auto* const real = next(&::name, #name); \
    return real;                                    \
  }())

#define OPEN_MODE(flags)                        \
  mode_t mode = 0;                              \
  if (((flags) & (O_CREAT | O_TMPFILE)) != 0) { \
    va_list more;                               \
    va_start(more, flags);                      \
    mode = va_arg(more, mode_t);                \
    va_end(more);                               \
  }

extern "C" {

int open(const char* path, int flags, ...) {
  OPEN_MODE(flags)
  return fails(kind_of_open(flags), "open", AT_FDCWD, path) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  OPEN_MODE(flags)
  return fails(kind_of_open(flags), "open", AT_FDCWD, path) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  OPEN_MODE(flags)
  return fails(kind_of_open(flags), "openat", folder, path) ? -1 : REAL(openat)(folder, path, flags, mode);
}

int openat64(int folder, const char* path, int flags, ...) {
  OPEN_MODE(flags)
  return fails(kind_of_open(flags), "openat", folder, path) ? -1 : REAL(openat64)(folder, path, flags, mode);
}

int creat(const char* path, mode_t mode) {
  return fails(kOpenForWriting, "creat", AT_FDCWD, path) ? -1 : REAL(creat)(path, mode);
}

FILE* fopen(const char* path, const char* mode) {
  return fails(kind_of_mode(mode), "fopen", AT_FDCWD, path) ? nullptr : REAL(fopen)(path, mode);
}

FILE* fopen64(const char* path, const char* mode) {
  return fails(kind_of_mode(mode), "fopen", AT_FDCWD, path) ? nullptr : REAL(fopen64)(path, mode);
}

size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
  if (!fails(kWrite, "fwrite", fileno(file))) return REAL(fwrite)(data, size, count, file);
  file->_flags |= 0x20;  // glibc's _IO_ERR_SEEN: ferror and fclose report it, as after a failed flush
  return 0;
}

ssize_t write(int descriptor, const void* data, size_t size) {
  return fails(kWrite, "write", descriptor) ? -1 : REAL(write)(descriptor, data, size);
}

ssize_t pwrite(int descriptor, const void* data, size_t size, off_t at) {
  return fails(kWrite, "pwrite", descriptor) ? -1 : REAL(pwrite)(descriptor, data, size, at);
}

ssize_t pwrite64(int descriptor, const void* data, size_t size, off64_t at) {
  return fails(kWrite, "pwrite", descriptor) ? -1 : REAL(pwrite64)(descriptor, data, size, at);
}

ssize_t writev(int descriptor, const iovec* parts, int count) {
  return fails(kWrite, "writev", descriptor) ? -1 : REAL(writev)(descriptor, parts, count);
}

ssize_t pwritev(int descriptor, const iovec* parts, int count, off_t at) {
  return fails(kWrite, "pwritev", descriptor) ? -1 : REAL(pwritev)(descriptor, parts, count, at);
}

ssize_t pwritev64(int descriptor, const iovec* parts, int count, off64_t at) {
  return fails(kWrite, "pwritev", descriptor) ? -1 : REAL(pwritev64)(descriptor, parts, count, at);
}

ssize_t sendfile(int to, int from, off_t* at, size_t size) {
  return fails(kWrite, "sendfile", to) ? -1 : REAL(sendfile)(to, from, at, size);
}

ssize_t sendfile64(int to, int from, off64_t* at, size_t size) {
  return fails(kWrite, "sendfile", to) ? -1 : REAL(sendfile64)(to, from, at, size);
}

ssize_t copy_file_range(int from, off64_t* from_at, int to, off64_t* to_at, size_t size, unsigned flags) {
  return fails(kWrite, "copy_file_range", to) ? -1 : REAL(copy_file_range)(from, from_at, to, to_at, size, flags);
}

int ftruncate(int descriptor, off_t size) {
  return fails(kWrite, "ftruncate", descriptor) ? -1 : REAL(ftruncate)(descriptor, size);
}

int ftruncate64(int descriptor, off64_t size) {
  return fails(kWrite, "ftruncate", descriptor) ? -1 : REAL(ftruncate64)(descriptor, size);
}

int fallocate(int descriptor, int mode, off_t at, off_t size) {
  return fails(kWrite, "fallocate", descriptor) ? -1 : REAL(fallocate)(descriptor, mode, at, size);
}

int fallocate64(int descriptor, int mode, off64_t at, off64_t size) {
  return fails(kWrite, "fallocate", descriptor) ? -1 : REAL(fallocate64)(descriptor, mode, at, size);
}

// These two return the error instead of setting errno.
int posix_fallocate(int descriptor, off_t at, off_t size) {
  return fails(kWrite, "posix_fallocate", descriptor) ? errno : REAL(posix_fallocate)(descriptor, at, size);
}

int posix_fallocate64(int descriptor, off64_t at, off64_t size) {
  return fails(kWrite, "posix_fallocate", descriptor) ? errno : REAL(posix_fallocate64)(descriptor, at, size);
}

int fsync(int descriptor) {
  return fails(kFlush, "fsync", descriptor) ? -1 : REAL(fsync)(descriptor);
}

int fdatasync(int descriptor) {
  return fails(kFlush, "fdatasync", descriptor) ? -1 : REAL(fdatasync)(descriptor);
}

int rename(const char* from, const char* to) {
  return fails(kName, "rename", AT_FDCWD, to) ? -1 : REAL(rename)(from, to);
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  return fails(kName, "renameat", to_folder, to) ? -1 : REAL(renameat)(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (fails(kName, "renameat2", to_folder, to)) return -1;
  return REAL(renameat2)(from_folder, from, to_folder, to, flags);
}

int mkdir(const char* path, mode_t mode) {
  return fails(kName, "mkdir", AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode);
}

int mkdirat(int folder, const char* path, mode_t mode) {
  return fails(kName, "mkdirat", folder, path) ? -1 : REAL(mkdirat)(folder, path, mode);
}

int link(const char* from, const char* to) {
  return fails(kName, "link", AT_FDCWD, to) ? -1 : REAL(link)(from, to);
}

int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  return fails(kName, "linkat", to_folder, to) ? -1 : REAL(linkat)(from_folder, from, to_folder, to, flags);
}

int symlink(const char* target, const char* path) {
  return fails(kName, "symlink", AT_FDCWD, path) ? -1 : REAL(symlink)(target, path);
}

int symlinkat(const char* target, int folder, const char* path) {
  return fails(kName, "symlinkat", folder, path) ? -1 : REAL(symlinkat)(target, folder, path);
}

int unlink(const char* path) {
  return fails(kRemove, "unlink", AT_FDCWD, path) ? -1 : REAL(unlink)(path);
}

int unlinkat(int folder, const char* path, int flags) {
  return fails(kRemove, "unlinkat", folder, path) ? -1 : REAL(unlinkat)(folder, path, flags);
}

int rmdir(const char* path) {
  return fails(kRemove, "rmdir", AT_FDCWD, path) ? -1 : REAL(rmdir)(path);
}

}  // extern "C"
