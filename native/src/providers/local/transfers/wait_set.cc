// wait_set.cc: see wait_set.h.
#include "providers/local/transfers/wait_set.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "providers/local/transfers/barrier.h"

namespace asyncfabric::local {
namespace {

constexpr int kMostAtOnce = 64;  // doorbells that one look empties; the others stay readable

}  // namespace

Status WaitSet::open(std::shared_ptr<Mapping> board, std::shared_ptr<WaitSet>* out) {
  UniqueFd set(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!set || !own) return {StatusCode::kNoMemory, errno};
  out->reset(new WaitSet(std::move(board), std::move(set), std::move(own)));
  return (*out)->join((*out)->own_.get());
}

void WaitSet::fall_asleep() {
  board_->as<Board>()->sleep.store(++sleeps_, std::memory_order_seq_cst);
  store_load_barrier();
}

void WaitSet::wake() const {
  if (board_->as<Board>()->sleep.load(std::memory_order_relaxed) == 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t done = write(own_.get(), &one, sizeof one);  // EAGAIN: readable already
}

void WaitSet::drain() {
  const std::lock_guard lock(mutex_);
  std::array<epoll_event, kMostAtOnce> rung;
  const int count = epoll_wait(set_.get(), rung.data(), kMostAtOnce, 0);
  for (int i = 0; i < count; ++i) {
    const int fd = rung[static_cast<size_t>(i)].data.fd;
    std::array<char, 512> bytes;  // more than a socket holds of single ones
    if (fd == own_.get()) {
      [[maybe_unused]] const ssize_t done = read(fd, bytes.data(), bytes.size());
      continue;
    }
    const ssize_t got = recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    // Its peer ended it, or makes it readable without a byte: it would be so for ever, and nobody could sleep.
    if (got == 0 || (got < 0 && errno != EINTR)) epoll_ctl(set_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
}

Status WaitSet::join(int doorbell) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = doorbell;
  if (epoll_ctl(set_.get(), EPOLL_CTL_ADD, doorbell, &event) != 0) return {StatusCode::kNoMemory, errno};
  return {};
}

void WaitSet::leave(UniqueFd doorbell) {
  const std::lock_guard lock(mutex_);
  // Closing alone would leave it in the set while anybody else has the file.
  epoll_ctl(set_.get(), EPOLL_CTL_DEL, doorbell.get(), nullptr);
  doorbell.reset();
}

}  // namespace asyncfabric::local
