// A link with latency, for kernels without netem: pairs of TAP devices in two namespaces, joined by queues of frames.
//
//   delay_line MICROSECONDS FROM_NAMESPACE:DEVICE:TO_NAMESPACE:DEVICE ...
//
// Creates both devices of each pair. A frame that leaves the first device arrives at the second after the delay; the
// way back has none, so that the latency from host to host, over a switch, is the delay, and the round trip is twice.
// Segmentation is offloaded: the kernel passes frames of up to 64 KiB, one copy for each. Prints "ready" once the
// devices exist; they vanish when it ends.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 65536 + 256, SLOTS = 65536, BATCH = 64, HEADER = 10, LINKS = 64 };

struct frame {
  uint64_t due;  // nanoseconds of the monotonic clock
  ssize_t size;
  char *bytes;
};

struct direction {  // a ring of frames on their way
  int in, out;
  uint64_t delay;
  uint64_t first, next;
  struct frame frames[SLOTS];
};

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static int make_device(const char *namespace, const char *name) {
  char path[256];
  snprintf(path, sizeof path, "/run/netns/%s", namespace);
  int inside = open(path, O_RDONLY | O_CLOEXEC);
  if (inside < 0 || setns(inside, CLONE_NEWNET)) fail(path);
  close(inside);
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  int header = HEADER;
  if (ioctl(device, TUNSETIFF, &request) || ioctl(device, TUNSETVNETHDRSZ, &header) ||
      ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN))
    fail(name);
  return device;
}

static struct direction *make_direction(int in, int out, uint64_t delay) {
  struct direction *made = calloc(1, sizeof *made);
  *made = (struct direction){.in = in, .out = out, .delay = delay};
  return made;
}

// Frames that find the ring or the device full are lost, as on any link.
static void receive(struct direction *d) {
  static char bytes[LARGEST];
  for (int i = 0; i < BATCH; i++) {
    ssize_t size = read(d->in, bytes, sizeof bytes);
    if (size <= 0) return;
    if (d->next - d->first == SLOTS) continue;
    struct frame *frame = &d->frames[d->next++ % SLOTS];
    *frame = (struct frame){now() + d->delay, size, malloc(size)};
    memcpy(frame->bytes, bytes, size);
  }
}

static void deliver(struct direction *d) {
  for (uint64_t time = now(); d->first != d->next; d->first++) {
    struct frame *frame = &d->frames[d->first % SLOTS];
    if (frame->due > time) return;
    if (write(d->out, frame->bytes, frame->size) < 0) { /* lost */ }
    free(frame->bytes);
  }
}

int main(int count, char **given) {
  struct direction *directions[2 * LINKS];
  struct pollfd polled[2 * LINKS];
  int all = 0;
  uint64_t delay = strtoull(given[1], NULL, 10) * 1000;
  for (int i = 2; i < count && all < 2 * LINKS; i++) {
    char *from = strtok(given[i], ":"), *name = strtok(NULL, ":");
    char *to = strtok(NULL, ":"), *other = strtok(NULL, ":");
    int host = make_device(from, name), port = make_device(to, other);
    directions[all++] = make_direction(host, port, delay);
    directions[all++] = make_direction(port, host, 0);
  }
  for (int i = 0; i < all; i++) polled[i] = (struct pollfd){.fd = directions[i]->in, .events = POLLIN};
  puts("ready");
  fflush(stdout);
  for (;;) {
    uint64_t time = now(), due = UINT64_MAX;
    for (int i = 0; i < all; i++) {
      struct direction *d = directions[i];
      if (d->first != d->next && d->frames[d->first % SLOTS].due < due) due = d->frames[d->first % SLOTS].due;
    }
    uint64_t wait = due > time ? due - time : 0;
    struct timespec limit = {wait / 1000000000ull, wait % 1000000000ull};
    if (ppoll(polled, all, due == UINT64_MAX ? NULL : &limit, NULL) < 0) fail("ppoll");
    for (int i = 0; i < all; i++)
      if (polled[i].revents & POLLIN) receive(directions[i]);
    for (int i = 0; i < all; i++) deliver(directions[i]);
  }
}
