// The file worker of `bench files`: it reads a parameter, computes its gradient, which is twice the
// parameter, writes it and commits, all by files of a mounted job.
//
//     cc -O2 -o files_step files_step.c && ./files_step FOLDER RANK
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void die(const char* what) {
  if (errno == ENOTCONN) exit(0);  // the job is over
  perror(what);
  exit(1);
}

static int open_file(const char* path, int flags) {
  int file = open(path, flags);
  if (file < 0) die(path);
  return file;
}

// Waits for a version larger than `done`, the version of the last commit.
static long next_version(int file, long done) {
  for (;;) {
    char text[32] = {0};
    if (pread(file, text, sizeof text - 1, 0) <= 0) die("version");
    long version = atol(text);
    if (version > done) return version;
    struct pollfd waits = {file, POLLIN, 0};
    if (poll(&waits, 1, -1) < 0) die("poll");
  }
}

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s FOLDER RANK\n", argv[0]), 2;
  char parameter[4096], gradient[4096], commit[4096], version_path[4096];
  snprintf(parameter, sizeof parameter, "%s/params/p0.npy", argv[1]);
  snprintf(gradient, sizeof gradient, "%s/grads/%s/p0.npy", argv[1], argv[2]);
  snprintf(commit, sizeof commit, "%s/grads/%s/commit", argv[1], argv[2]);
  snprintf(version_path, sizeof version_path, "%s/grads/%s/version", argv[1], argv[2]);
  int version_file = open_file(version_path, O_RDONLY);
  size_t size = 0;
  char* data = NULL;
  for (long done = 1;;) {
    long version = next_version(version_file, done);
    int file = open_file(parameter, O_RDONLY);
    if (data == NULL) {
      struct stat about;
      if (fstat(file, &about) != 0) die(parameter);
      size = about.st_size;
      if ((data = malloc(size)) == NULL) die("malloc");
    }
    for (size_t at = 0; at < size;) {
      ssize_t count = pread(file, data + at, size - at, at);
      if (count <= 0) die(parameter);
      at += count;
    }
    close(file);
    // The gradient has the same header as the parameter.
    size_t start = 10 + (unsigned char)data[8] + 256 * (unsigned char)data[9];
    for (size_t at = start; at + sizeof(float) <= size; at += sizeof(float)) {
      float value;
      memcpy(&value, data + at, sizeof value);
      value *= 2;
      memcpy(data + at, &value, sizeof value);
    }
    file = open_file(gradient, O_WRONLY | O_TRUNC);
    for (size_t at = 0; at < size;) {
      ssize_t count = pwrite(file, data + at, size - at, at);
      if (count <= 0) die(gradient);
      at += count;
    }
    if (close(file) != 0) die(gradient);
    char text[32];
    int length = snprintf(text, sizeof text, "version %ld\n", version);
    file = open_file(commit, O_WRONLY | O_TRUNC);
    if (write(file, text, length) != length || fsync(file) != 0) die(commit);
    close(file);
    done = version;
  }
}
