// incoming.cc: see incoming.h.
#include "providers/local/peers/incoming.h"

#include <cstring>

namespace asyncfabric::local {
namespace {

RailEvent immediate(uint32_t imm) {
  RailEvent event;
  event.kind = RailEventKind::kImmediate;
  event.imm = imm;
  return event;
}

}  // namespace

size_t Incoming::drain(std::span<RailEvent> events, MessageShelf& shelf, Regions& regions, const Copier& copier) {
  size_t count = 0;
  bool used_staging = false;
  bool answered = false;
  while (count < events.size() && has_entry()) {
    EntryBody body;
    ring_.read(&body);
    if (shut_out_ || (body.kind != EntryKind::kMessage && !admitted())) {
      imms_taken_ = 0;
      ring_.set_result(static_cast<uint32_t>(StatusCode::kPeerDead));
      answered = true;
      ring_.advance();
      continue;
    }
    if (body.kind == EntryKind::kImmediates && body.count > 0 && body.count <= kImmsPerEntry) {
      while (imms_taken_ < body.count && count < events.size()) events[count++] = immediate(body.imms[imms_taken_++]);
      if (imms_taken_ < body.count) break;
      imms_taken_ = 0;
    } else if (body.kind == EntryKind::kMessage && body.length <= (body.inlined != 0 ? kInlineBytes : kMaxSendBytes)) {
      const uint8_t* from = body.inlined != 0 ? body.bytes : ring_.staging(body.staging, body.length);
      if (from == nullptr) {
        broken_ = true;
        break;
      }
      uint8_t* copy = shelf.take(body.length);
      if (copy == nullptr) break;
      if (body.length > 0) std::memcpy(copy, from, body.length);
      RailEvent& event = events[count++];
      event = RailEvent();
      event.kind = RailEventKind::kMessage;
      event.data = copy;
      event.length = body.length;
      event.connection = number_;
      used_staging = used_staging || body.inlined == 0;
    } else if (body.kind == EntryKind::kBounceWrite || body.kind == EntryKind::kBounceRead) {
      const StatusCode code = bounce(body, regions, copier);
      ring_.set_result(static_cast<uint32_t>(code));
      if (code == StatusCode::kOk && body.kind == EntryKind::kBounceWrite && body.has_imm != 0)
        events[count++] = immediate(body.bounce.imm);
      answered = true;
    } else {
      broken_ = true;
      break;
    }
    ring_.advance();
  }
  const bool wanted = ring_.give_back(used_staging || answered);
  if (wanted || answered) producer_->wake();
  return count;
}

StatusCode Incoming::bounce(const EntryBody& body, Regions& regions, const Copier& copier) {
  uint8_t* staged = ring_.staging(body.bounce.staging, body.length);
  if (staged == nullptr || body.length > kMaxRequestBytes) return StatusCode::kInvalidArgument;
  const bool write = body.kind == EntryKind::kBounceWrite;
  const Regions::Access access(regions, {body.bounce.slot, body.bounce.word}, body.bounce.offset, body.length,
                               write ? kAccessRemoteWrite : kAccessRemoteRead);
  if (!access.status().ok()) return access.status().code;
  if (write)
    copier.copy(access.data(), staged, body.length);
  else
    copier.copy(staged, access.data(), body.length);
  return StatusCode::kOk;
}

}  // namespace asyncfabric::local
