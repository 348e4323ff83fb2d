/* Peers: connections that this side opened, and the messages that go over connections of either side. */
#define _GNU_SOURCE
#include "_ucx_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { MESSAGES_PER_PEER = 4096 };

/* ---- messages ---- */

/* What must stay until UCX has sent it: the header, and the payload unless it lies in registered memory. */
typedef struct {
    Worker *worker;
    size_t *counter;
    char bytes[];
} Message;

static void on_sent(void *request, ucs_status_t status, void *argument)
{
    (void)status; /* a lost peer is reported once, by on_error */
    Message *message = argument;
    --*message->counter;
    message->worker->ucx.ucp_request_free(request);
    free(message);
}

int message_send(Worker *w, ucp_ep_h endpoint, unsigned id, const void *header, size_t header_bytes,
                 const void *payload, size_t payload_bytes, ucp_mem_h memory, size_t *counter, char *error)
{
    size_t kept = memory == NULL ? payload_bytes : 0;
    Message *message = malloc(sizeof *message + header_bytes + kept);
    if (message == NULL)
        return fail(w, error, "message", UCS_ERR_NO_MEMORY);
    message->worker = w;
    message->counter = counter;
    memcpy(message->bytes, header, header_bytes);
    if (kept > 0)
        payload = memcpy(message->bytes + header_bytes, payload, kept);
    ucp_request_param_t params = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        (memory == NULL ? 0 : UCP_OP_ATTR_FIELD_MEMH),
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb = {.send = on_sent},
        .user_data = message,
        .memh = memory,
    };
    ucs_status_ptr_t request =
        w->ucx.ucp_am_send_nbx(endpoint, id, message->bytes, header_bytes, payload, payload_bytes, &params);
    if (UCS_PTR_IS_PTR(request)) {
        ++*counter;
        return 0;
    }
    free(message);
    return request == NULL ? 0 : fail(w, error, "message", UCS_PTR_STATUS(request));
}
/* ---- peers ---- */

Peer *worker_peer(Worker *w, int64_t id)
{
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next)
        if (peer->id == id && !peer->closed)
            return peer;
    return NULL;
}

static void peer_lost(Peer *peer, ucs_status_t status, const char *text)
{
    if (peer->lost || peer->closed)
        return;
    peer->lost = true;
    peer->status = status;
    Event *event = event_new(peer->worker, EVENT_LOST, peer->id);
    if (event != NULL)
        snprintf(event->text, TEXT_BYTES, "%s", text);
}

static void on_error(void *argument, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint;
    Peer *peer = argument;
    peer_lost(peer, status, peer->worker->ucx.ucs_status_string(status));
}

bool peer_idle(const Peer *peer)
{
    return peer->operation_count == 0 && peer->message_count == 0 && peer->flush_count == 0;
}

static bool peer_used(const Worker *w, const Peer *peer)
{
    for (const Batch *batch = w->batches; batch != NULL; batch = batch->next)
        if (batch->peer == peer)
            return true;
    return false;
}

/* Frees closed peers that no callback can name any more. */
void sweep_peers(Worker *w)
{
    for (Peer **at = &w->peers; *at != NULL;) {
        Peer *peer = *at;
        if (!peer->closed || peer->endpoint != NULL || !peer_idle(peer) || peer_used(w, peer)) {
            at = &peer->next;
            continue;
        }
        for (size_t i = 0; i < peer->key_count; i++)
            w->ucx.ucp_rkey_destroy(peer->keys[i].key);
        *at = peer->next;
        free(peer->keys);
        free(peer);
    }
}

static void on_connected(void *request, ucs_status_t status, void *argument)
{
    Peer *peer = argument;
    peer->flush_count--;
    peer->flushed = status == UCS_OK;
    if (status != UCS_OK)
        peer_lost(peer, status, peer->worker->ucx.ucs_status_string(status));
    if (request != NULL)
        peer->worker->ucx.ucp_request_free(request);
}

static void greet(Worker *w, Peer *peer)
{
    char error[TEXT_BYTES];
    ucp_address_t *address;
    size_t address_bytes;
    peer->greeted = true;
    if (worker_address(w, &address, &address_bytes, error) != 0) {
        peer_lost(peer, UCS_ERR_NO_MEMORY, error);
        return;
    }
    size_t nbytes = sizeof(uint32_t) + w->name_bytes + address_bytes;
    char *payload = malloc(nbytes);
    if (payload != NULL) {
        uint32_t name_bytes = (uint32_t)w->name_bytes;
        memcpy(payload, &name_bytes, sizeof name_bytes);
        memcpy(payload + sizeof name_bytes, w->name, w->name_bytes);
        memcpy(payload + sizeof name_bytes + w->name_bytes, address, address_bytes);
        Hello hello = {peer->nonce};
        if (message_send(w, peer->endpoint, AM_HELLO, &hello, sizeof hello, payload, nbytes, NULL,
                         &peer->message_count, error) != 0)
            peer_lost(peer, UCS_ERR_UNREACHABLE, error);
    }
    free(payload);
    w->ucx.ucp_worker_release_address(w->worker, address);
}

Peer *peer_by_nonce(Worker *w, uint64_t nonce)
{
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next)
        if (peer->nonce == nonce && !peer->lost && !peer->closed)
            return peer;
    return NULL;
}

unsigned lanes_of(const Worker *w, ucp_ep_h endpoint, ucp_transport_entry_t *lanes)
{
    ucp_ep_attr_t attributes = {.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS};
    attributes.transports.entries = lanes;
    attributes.transports.num_entries = MOST_LANES;
    attributes.transports.entry_size = sizeof *lanes;
    return w->ucx.ucp_ep_query(endpoint, &attributes) == UCS_OK ? attributes.transports.num_entries : 0;
}

/* Whether GET is done by the kernel or by hardware over this endpoint's lanes, and not by messages. */
static bool reads_directly(Worker *w, Peer *peer)
{
    static const char *const able[] = {"cma", "knem", "xpmem", "rc", "dc", "srd"};
    ucp_transport_entry_t lanes[MOST_LANES];
    unsigned count = w->direct ? lanes_of(w, peer->endpoint, lanes) : 0;
    for (unsigned i = 0; i < count; i++) {
        const char *name = lanes[i].transport_name;
        for (size_t k = 0; k < sizeof able / sizeof able[0]; k++) {
            size_t length = strlen(able[k]);
            if (strncmp(name, able[k], length) == 0 && (name[length] == '\0' || name[length] == '_'))
                return true;
        }
    }
    return false;
}

static ucs_status_t on_welcome(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                               const ucp_am_recv_param_t *param)
{
    (void)data, (void)nbytes, (void)param;
    Worker *w = argument;
    Hello hello;
    if (header_bytes != sizeof hello)
        return UCS_OK;
    memcpy(&hello, header, sizeof hello);
    Peer *peer = peer_by_nonce(w, hello.nonce);
    if (peer != NULL && !peer->ready) {
        peer->ready = true;
        peer->direct = reads_directly(w, peer);
        network_used(w, peer->endpoint);
        event_new(w, EVENT_READY, peer->id);
    }
    return UCS_OK;
}

static ucs_status_t on_bye(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                           const ucp_am_recv_param_t *param)
{
    (void)data, (void)nbytes, (void)param;
    Worker *w = argument;
    Hello hello;
    if (header_bytes != sizeof hello)
        return UCS_OK;
    memcpy(&hello, header, sizeof hello);
    Peer *peer = peer_by_nonce(w, hello.nonce);
    if (peer != NULL)
        peer_lost(peer, UCS_ERR_CONNECTION_RESET, "the peer closed");
    serve_bye(w, hello.nonce);
    return UCS_OK;
}

static int unpack_keys(Worker *w, Peer *peer, const PackedKey *keys, size_t count, char *error)
{
    peer->keys = calloc(count + 1, sizeof *peer->keys);
    if (peer->keys == NULL)
        return fail(w, error, "keys", UCS_ERR_NO_MEMORY);
    for (size_t i = 0; i < count; i++) {
        Key *key = &peer->keys[i];
        ucs_status_t status = w->ucx.ucp_ep_rkey_unpack(peer->endpoint, keys[i].data, &key->key);
        if (status != UCS_OK)
            return fail(w, error, "the peer's memory key", status);
        key->address = keys[i].address;
        key->nbytes = keys[i].nbytes;
        peer->key_count++;
    }
    qsort(peer->keys, count, sizeof *peer->keys, by_address);
    return 0;
}

int64_t worker_connect(Worker *w, const void *address, const PackedKey *keys, size_t key_count, double deadline,
                       char *error)
{
    Peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL)
        return fail(w, error, "peer", UCS_ERR_NO_MEMORY);
    peer->worker = w;
    peer->operations.next = peer->operations.previous = &peer->operations;
    peer->connect_deadline = deadline;
    if (getrandom(&peer->nonce, sizeof peer->nonce, 0) != sizeof peer->nonce) {
        free(peer);
        return fail(w, error, "connect", UCS_ERR_NO_RESOURCE);
    }
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = peer},
    };
    ucs_status_t status = w->ucx.ucp_ep_create(w->worker, &params, &peer->endpoint);
    if (status != UCS_OK) {
        free(peer);
        return fail(w, error, "connect", status);
    }
    peer->id = ++w->last_id;
    peer->next = w->peers;
    w->peers = peer;
    if (unpack_keys(w, peer, keys, key_count, error) != 0) {
        peer->closed = true;
        close_endpoint(w, &peer->endpoint, UCP_EP_CLOSE_FLAG_FORCE, now_s() + 1);
        sweep_peers(w);
        return -1;
    }
    ucp_request_param_t flush = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb = {.send = on_connected},
        .user_data = peer,
    };
    peer->flush_count++;
    ucs_status_ptr_t request = w->ucx.ucp_ep_flush_nbx(peer->endpoint, &flush);
    if (!UCS_PTR_IS_PTR(request))
        on_connected(NULL, UCS_PTR_STATUS(request), peer);
    return peer->id;
}
/* ---- signals ---- */

static ucs_status_t on_signal(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                              const ucp_am_recv_param_t *param)
{
    Worker *w = argument;
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)
        return UCS_OK; /* never sent by us: signals are eager */
    Event *event = event_new(w, EVENT_SIGNAL, 0);
    if (event == NULL || (event->data = malloc(header_bytes + nbytes + 1)) == NULL)
        return UCS_OK;
    memcpy(event->data, header, header_bytes);
    memcpy(event->data + header_bytes, data, nbytes);
    event->sender_bytes = header_bytes;
    event->data_bytes = nbytes;
    return UCS_OK;
}

int worker_signal(Worker *w, int64_t peer_id, const void *payload, size_t nbytes, char *error)
{
    Peer *peer = worker_peer(w, peer_id);
    if (peer == NULL || peer->lost) {
        snprintf(error, TEXT_BYTES, "%s", peer == NULL ? "no such peer" : "the peer is lost");
        return -1;
    }
    if (peer->message_count >= MESSAGES_PER_PEER) {
        snprintf(error, TEXT_BYTES, "%d messages to the peer are unsent", MESSAGES_PER_PEER);
        return -1;
    }
    return message_send(w, peer->endpoint, AM_SIGNAL, w->name, w->name_bytes, payload, nbytes, NULL,
                        &peer->message_count, error);
}

void say_bye(Worker *w, Peer *peer)
{
    char error[TEXT_BYTES];
    Hello bye = {peer->nonce};
    if (peer->greeted)
        message_send(w, peer->endpoint, AM_BYE, &bye, sizeof bye, NULL, 0, NULL, &peer->message_count, error);
}

/* Greets where the way is clear, and gives up connects that are late. */
void peers_advance(Worker *w, double time)
{
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        if (peer->ready || peer->lost || peer->closed)
            continue;
        if (peer->flushed && !peer->greeted)
            greet(w, peer);
        if (time >= peer->connect_deadline)
            peer_lost(peer, UCS_ERR_TIMED_OUT, "no answer by the deadline of the connect");
    }
}

ucs_status_t peer_set_handlers(Worker *w)
{
    ucs_status_t status = set_handler(w, AM_SIGNAL, on_signal);
    if (status == UCS_OK)
        status = set_handler(w, AM_WELCOME, on_welcome);
    return status == UCS_OK ? set_handler(w, AM_BYE, on_bye) : status;
}
