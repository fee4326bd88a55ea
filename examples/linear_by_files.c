// A worker of linear_by_files.py in C: it reads parameters, writes gradients and commits them, all
// by files of a mounted job.
//
//     cc -o linear linear_by_files.c && ./linear FOLDER RANK
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[1024];
static int rank_;
static long steps;

static int open_file(const char* format, const char* name, int flags) {
  char path[2048];
  if (strcmp(format, "params") == 0)
    snprintf(path, sizeof path, "%s/params/%s.npy", folder, name);
  else
    snprintf(path, sizeof path, "%s/grads/%d/%s", folder, rank_, name);
  return open(path, flags);
}

static void die(const char* what) {
  if (errno == ENOTCONN) {  // the job is over
    printf("%ld steps\n", steps);
    exit(0);
  }
  perror(what);
  exit(1);
}

// Returns the version whose gradients are wanted; 0 when the job is over.
static long wanted_version(void) {
  char text[32] = {0};
  int file = open_file("grads", "version", O_RDONLY);
  if (file < 0) return 0;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  return size > 0 ? atol(text) : 0;
}

// Reads a parameter of `count` elements, and its header, which its gradient needs too.
static size_t read_parameter(const char* name, float* values, size_t count, char header[128]) {
  int file = open_file("params", name, O_RDONLY);
  if (file < 0) die(name);
  size_t length = 0;
  char start[10];
  if (pread(file, start, 10, 0) != 10) die(name);
  length = 10 + (unsigned char)start[8] + 256 * (unsigned char)start[9];
  if (length > 128 || pread(file, header, length, 0) != (ssize_t)length) die(name);
  if (pread(file, values, 4 * count, length) != (ssize_t)(4 * count)) die(name);
  close(file);
  return length;
}

static void write_gradient(const char* name, const float* values, size_t count, const char* header,
                           size_t length) {
  int file = open_file("grads", name, O_WRONLY | O_TRUNC);
  if (file < 0) die(name);
  if (pwrite(file, header, length, 0) != (ssize_t)length) die(name);
  if (pwrite(file, values, 4 * count, length) != (ssize_t)(4 * count)) die(name);
  if (close(file) != 0) die(name);
}

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s FOLDER RANK\n", argv[0]), 2;
  snprintf(folder, sizeof folder, "%s", argv[1]);
  rank_ = atoi(argv[2]);
  long done = 1, version;
  // Wait until the script has made its optimizer.
  while ((errno = 0, wanted_version()) == 0 && errno == ENOENT) usleep(100000);
  while ((version = wanted_version()) != 0) {
    if (version <= done) {  // committed already
      usleep(500);
      continue;
    }
    float weight[2], bias[1], weight_gradient[2] = {0, 0}, bias_gradient[1] = {0};
    char weight_header[128], bias_header[128];
    size_t weight_length = read_parameter("weight", weight, 2, weight_header);
    size_t bias_length = read_parameter("bias", bias, 1, bias_header);
    for (int i = 0; i < 5; ++i) {  // the gradient of the mean of (prediction - y)^2
      float a = -1.0f + 0.5f * i, b = -a, y = 2 * a - 3 * b + 1;
      float error = weight[0] * a + weight[1] * b + bias[0] - y;
      weight_gradient[0] += 2 * error * a / 5;
      weight_gradient[1] += 2 * error * b / 5;
      bias_gradient[0] += 2 * error / 5;
    }
    write_gradient("weight.npy", weight_gradient, 2, weight_header, weight_length);
    write_gradient("bias.npy", bias_gradient, 1, bias_header, bias_length);
    char text[32];
    int size = snprintf(text, sizeof text, "version %ld\n", version);
    int commit = open_file("grads", "commit", O_WRONLY | O_TRUNC);
    if (commit < 0 || write(commit, text, size) != size) die("commit");
    if (fsync(commit) == 0) {
      done = version;
      ++steps;
    } else if (errno != ESTALE) {  // ESTALE: the parameters were changed meanwhile
      die("commit");
    }
    close(commit);
  }
  printf("%ld steps\n", steps);
  return 0;
}
