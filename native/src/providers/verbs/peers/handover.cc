// handover.cc: see handover.h.
#include "providers/verbs/peers/handover.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "providers/verbs/peers/connection.h"
#include "providers/verbs/transfers/receives.h"

namespace asyncfabric::verbs {
namespace {

void ring(int fd) {
  const uint64_t one = 1;
  if (write(fd, &one, sizeof one) < 0) return;  // full: it is readable anyway
}

void drain(int fd) {
  uint64_t count = 0;
  if (read(fd, &count, sizeof count) < 0) return;  // nobody rang
}

}  // namespace

Handover::Handover()
    : jobs_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), news_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void Handover::ask(Job job) {
  {
    const std::lock_guard<std::mutex> guard(jobs_mutex_);
    jobs_.push_back(std::move(job));
  }
  ring(jobs_fd_.get());
}

std::vector<Job> Handover::jobs() {
  drain(jobs_fd_.get());
  const std::lock_guard<std::mutex> guard(jobs_mutex_);
  return std::exchange(jobs_, {});
}

void Handover::stop() {
  stopping_.store(true, std::memory_order_release);
  ring(jobs_fd_.get());
}

void Handover::post(News news) {
  {
    const std::lock_guard<std::mutex> guard(news_mutex_);
    news_.push_back(std::move(news));
    has_news_.store(true, std::memory_order_release);
  }
  ring(news_fd_.get());
}

std::vector<News> Handover::news() {
  drain(news_fd_.get());
  const std::lock_guard<std::mutex> guard(news_mutex_);
  has_news_.store(false, std::memory_order_release);
  return std::exchange(news_, {});
}

}  // namespace asyncfabric::verbs
