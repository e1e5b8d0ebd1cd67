// admission.cc: how fabrics with a secret prove it, and what becomes of hellos that do not. Under the engine lock.
//   us                                                      them
//   kHello(address, our nonce, code) ----------------->     a wrong code: kRefused, and no entry anywhere
//                       <---- over each lane of theirs:     kChallenge(our nonce, their nonce, code)
//   that lane is admitted here
//   over each lane of ours: kProof(both nonces, code) ->    that lane is admitted there
//                                                <----      kWelcome; both are connected when all their lanes are admitted
// Every code is over the header too (kind, sender, target, lane and lives) and over the address that it was sent to. A hello alone may be an old one that somebody kept, so it admits
// nothing; challenge and proof name a nonce that the receiver made for this entry. A proof that is repeated over another connection than it
// first came over is refused. Sources: FIPS 180-4, RFC 2104; ISO/IEC 9798-4 (three passes, mutual).
#include "engine/peers/admission.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "engine/core.h"
#include "engine/peers/greeting.h"

namespace asyncfabric {
namespace {

constexpr size_t kNonceBytes = sizeof(secret::Nonce);

secret::Nonce take_nonce(std::string_view* bytes) {
  secret::Nonce nonce{};
  bytes->substr(0, kNonceBytes).copy(nonce.data(), nonce.size());
  bytes->remove_prefix(std::min(bytes->size(), kNonceBytes));
  return nonce;
}

const char* mismatch_text(SecretMismatch why) {
  switch (why) {
    case SecretMismatch::kSenderHasOne: return "this fabric has a secret and the peer has none";
    case SecretMismatch::kSenderHasNone: return "the peer asks for a secret and this fabric has none";
    case SecretMismatch::kTheyDiffer: return "the peer has another secret than this fabric";
  }
  return nullptr;
}

}  // namespace

void Core::send_sealed(Peer& peer, uint32_t lane, MessageType type, uint64_t value, std::string payload) {
  const MessageHeader header{type, incarnation, peer.incarnation, value, peer.their_life};
  secret::seal(config.secret, peer.lanes[lane].address, header_bytes(header), &payload);
  send_message(peer, lane, type, value, payload);
}

// Takes the code off the payload; false: it is not that of our secret, or the message was sent to another rail than it came to.
bool Core::unseal_message(const MessageHeader& header, Inbound inbound, std::string_view* payload) const {
  return secret::unseal(config.secret, rails[inbound.first]->rail->address(), header_bytes(header), payload);
}

// What came over this connection may be from that peer. Without a secret its first message decides.
bool Core::belongs(Peer& peer, Inbound inbound) {
  if (inbound.second == 0) return !has_secret();
  if (const PeerId owner = admission.owner(inbound); owner == peer.id) return true;
  return !has_secret() && !peer.ended() && admit(peer, inbound);
}

bool Core::admit(Peer& peer, Inbound inbound) {
  if (inbound.second == 0) return false;
  if (const PeerId owner = admission.owner(inbound); owner != 0 && owner != peer.id) return false;
  if (has_secret() && !rails[inbound.first]->rail->admit(inbound.second)) return false;
  if (!peer.came_over(inbound)) return false;
  admission.give(inbound, peer.id);
  return true;
}

// A connection is of one sender: while its first hello is not finished, it brings those of no other.
bool Core::has_room_for_hello(Inbound inbound) const {
  size_t unfinished = 0;
  for (const auto& peer : peers) {
    const bool mute = peer->state == PeerState::kConnected && !peer->met && !peer->reports_loss;
    if (peer->active || (peer->state != PeerState::kConnecting && !mute)) continue;
    if (inbound.second != 0 && peer->hello_came_over == inbound) return false;
    ++unfinished;
  }
  return unfinished < Admission::kMostUnfinished;
}

// Over the lane of ours that answers theirs; behind their first one over all of ours that are not admitted there, of which they may have fewer.
void Core::challenge(Peer& peer, uint64_t their_lane) {
  const uint32_t own = static_cast<uint32_t>(std::min<uint64_t>(their_lane, peer.lanes.size() - 1));
  const bool proven = peer.proven.contains(their_lane);
  if (proven) send_welcome(peer, their_lane);
  for (uint32_t lane = 0; lane < peer.lanes.size(); ++lane) {
    const bool wanted = !peer.lanes[lane].welcomed && (lane == own || their_lane == 0);
    if (!wanted && (lane != own || proven)) continue;
    ByteWriter payload;
    payload.put_raw(secret::text_of(peer.their_nonce));
    payload.put_raw(secret::text_of(peer.nonce));
    payload.put(lane);
    send_sealed(peer, lane, MessageType::kChallenge, greeting(their_lane, peer), payload.text());
  }
}

// The peer that a challenge or a proof is from, if it is for our entry of it.
Peer* Core::peer_behind(const MessageHeader& header) {
  const auto known = peer_of_incarnation.find(header.sender);
  Peer* peer = known == peer_of_incarnation.end() ? nullptr : known->second;
  const bool fits = has_secret() && peer != nullptr && !peer->ended() && peer->wired && header.target == incarnation &&
                    header.life == peer->life();
  if (!fits) tallies.messages_refused.add(1);
  return fits ? peer : nullptr;
}

void Core::on_challenge(const MessageHeader& header, std::string_view payload, Inbound inbound) {
  Peer* peer = peer_behind(header);
  if (peer == nullptr) return;
  Greeting stated;
  const bool intact = unseal_message(header, inbound, &payload) &&
                      payload.size() == 2 * kNonceBytes + sizeof(uint32_t) &&
                      read_greeting(header.value, peer->lanes.size(), &stated);
  if (!intact || take_nonce(&payload) != peer->nonce) {
    tallies.messages_refused.add(1);
    return;
  }
  const secret::Nonce theirs = take_nonce(&payload);
  const uint32_t lane = ByteReader(payload).get<uint32_t>();
  const bool known = peer->their_life == stated.life;
  if (peer->their_life != 0 && !known && !is_later(stated.life, peer->their_life)) return;
  if (lane >= kMaxMaskedLanes || (known && peer->their_nonce != secret::Nonce{} && peer->their_nonce != theirs) ||
      !admit(*peer, inbound)) {
    tallies.messages_refused.add(1);
    return;
  }
  begin_life(*peer, stated.life);
  peer->their_nonce = theirs;
  peer->received = true;
  peer->admitted_lanes |= 1ull << lane;
  ByteWriter proof;
  proof.put_raw(secret::text_of(peer->their_nonce));
  proof.put_raw(secret::text_of(peer->nonce));
  proof.put(peer->admitted_lanes);
  const size_t room = kMaxMessageBytes - proof.text().size() - sizeof(secret::Digest);
  proof.put_raw(generations.slice(0, room));
  send_sealed(*peer, static_cast<uint32_t>(stated.lane), MessageType::kProof, greeting(stated.lane, *peer),
              proof.text());
}

void Core::on_proof(const MessageHeader& header, std::string_view payload, Inbound inbound) {
  Peer* peer = peer_behind(header);
  if (peer == nullptr) return;
  Greeting stated;
  const bool intact = unseal_message(header, inbound, &payload) &&
                      payload.size() >= 2 * kNonceBytes + sizeof(uint64_t) &&
                      read_greeting(header.value, kMaxMaskedLanes, &stated) && stated.life == peer->their_life;
  if (!intact || take_nonce(&payload) != peer->nonce || take_nonce(&payload) != peer->their_nonce) {
    tallies.messages_refused.add(1);
    return;
  }
  const auto before = peer->proven.find(stated.lane);
  if ((before != peer->proven.end() && before->second != inbound) || !admit(*peer, inbound)) {
    tallies.messages_refused.add(1);
    return;
  }
  ByteReader reader(payload);
  const auto admitted = reader.get<uint64_t>();
  peer->proven[stated.lane] = inbound;
  peer->received = peer->met = true;
  learn_generations(*peer, reader.rest());
  for (size_t lane = 0; lane < peer->lanes.size(); ++lane)
    if ((admitted >> lane & 1) != 0) peer->lanes[lane].welcomed = true;
  send_welcome(*peer, stated.lane);
  if (std::all_of(peer->lanes.begin(), peer->lanes.end(), [](const Lane& lane) { return lane.welcomed; }))
    connected(*peer);
}

// From the process that took over the address.
void Core::on_reject(const MessageHeader& header, std::string_view payload, Inbound inbound) {
  const auto meant = peer_of_incarnation.find(header.value);
  if (header.target != incarnation || meant == peer_of_incarnation.end()) return;
  Peer& peer = *meant->second;
  if (peer.state != PeerState::kConnecting) return;
  if (has_secret() && (!unseal_message(header, inbound, &payload) || payload != secret::text_of(peer.nonce))) {
    tallies.messages_refused.add(1);
    return;
  }
  connect_failed(peer, StatusCode::kStaleKey);
}

// The refusal has no code that could be checked. It names our nonce, which nobody knows who did not get our hello.
void Core::on_refused(const MessageHeader& header, std::string_view payload) {
  const auto meant = peer_of_incarnation.find(header.value);
  Peer* peer = meant == peer_of_incarnation.end() ? nullptr : meant->second;
  const bool ours = peer != nullptr && header.target == incarnation && peer->state == PeerState::kConnecting &&
                    payload.size() == kNonceBytes + 1 && take_nonce(&payload) == peer->nonce;
  const char* why = ours ? mismatch_text(static_cast<SecretMismatch>(payload[0])) : nullptr;
  if (why == nullptr) {
    tallies.messages_refused.add(1);
    return;
  }
  note_error(why);
  connect_failed(*peer, StatusCode::kSecretRefused);
}

void Core::refuse_hello(const MessageHeader& hello, const AddressBlob& from, const secret::Nonce& nonce,
                        SecretMismatch why) {
  tallies.messages_refused.add(1);
  Admission::Refusal refusal;
  refusal.message.resize(kHeaderBytes);
  encode_header({MessageType::kRefused, incarnation, hello.sender, hello.target, 0}, refusal.message.data());
  refusal.message.append(secret::text_of(nonce));
  refusal.message.push_back(static_cast<char>(why));
  const bool known = std::any_of(admission.refusals.begin(), admission.refusals.end(),
                                 [&](const auto& other) { return other.message == refusal.message; });
  if (known || admission.refusals.size() >= Admission::kMostRefusals) return;
  refusal.number = admission.next_refusal++;
  refusal.until_ns = now_ns() + Admission::kRefusalNs;
  next_tick_ns = 0;
  const auto path = std::make_shared<RefusalPath>();
  path->number = refusal.number;
  path->until_ns = now_ns() + Admission::kRefusalConnectNs;
  path->to = from;
  control.post_behind([this, path] { connect_refusal(path); });
  admission.refusals.push_back(std::move(refusal));
}

void Core::connect_refusal(const std::shared_ptr<RefusalPath>& path) {
  std::unique_ptr<RailPeer> handle;
  uint32_t rail = 0;
  for (const AddressBlob::RailPart& part : path->to.rails) {
    for (rail = 0; rail < rails.size() && handle == nullptr; ++rail) {
      const bool fits = rails[rail]->protocol == part.protocol &&
                        (!rails[rail]->capabilities.same_host_only || path->to.host == host);
      if (!fits) continue;
      const uint64_t patience =
          connect_patience(*rails[rail], path->pauses, Admission::kRefusalConnectNs, kStrangersTurnNs);
      const Status status = at_rail(rail, [&](Rail& each) { return each.connect(part.address, patience, &handle); });
      if (status.code == StatusCode::kBusy && now_ns() < path->until_ns)
        return control.post_later(path->pauses.next_ns(), [this, path] { connect_refusal(path); });
      if (handle != nullptr) break;
    }
    if (handle != nullptr) break;
  }
  if (handle == nullptr) return;
  const Moment moment(*this);
  for (Admission::Refusal& refusal : admission.refusals)
    if (refusal.number == path->number) {
      refusal.rail = rail;
      refusal.path = std::move(handle);
    }
  handle.reset();  // under the engine lock, as all that rails do about their peers
  next_tick_ns = 0;
}

void Core::advance_refusals(uint64_t now) {
  for (Admission::Refusal& refusal : admission.refusals) {
    if (refusal.path == nullptr) continue;
    Rail& rail = *rails[refusal.rail]->rail;
    if (!refusal.sent) {
      WorkRequest request;
      request.kind = WorkKind::kSend;
      request.peer = refusal.path.get();
      request.address = refusal.message.data();
      request.length = refusal.message.size();
      refusal.sent = rail.post({&request, 1}).accepted == 1;
    }
    if (now >= refusal.until_ns) rail.disconnect(*refusal.path);
  }
  std::erase_if(admission.refusals, [now](const Admission::Refusal& refusal) { return now >= refusal.until_ns; });
}

}  // namespace asyncfabric
