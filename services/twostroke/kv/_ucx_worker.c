#define _GNU_SOURCE
#include "_ucx_worker.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* UCX reports through its descriptor; these bound the harm if it once does not. */
static const double SLEEP_BUSY_S = 0.05, SLEEP_IDLE_S = 5.0;

double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int fail(Worker *w, char *error, const char *what, ucs_status_t status)
{
    snprintf(error, TEXT_BYTES, "%s: %s", what, w->ucx.ucs_status_string(status));
    return -1;
}
/* ---- events ---- */

Event *event_new(Worker *w, EventKind kind, int64_t id)
{
    Event *event = calloc(1, sizeof *event);
    if (event == NULL)
        return NULL;
    event->kind = kind;
    event->id = id;
    if (w->last_event != NULL)
        w->last_event->next = event;
    else
        w->first_event = event;
    w->last_event = event;
    return event;
}

Event *worker_take_events(Worker *w)
{
    Event *first = w->first_event;
    w->first_event = w->last_event = NULL;
    return first;
}

void event_free(Event *event)
{
    free(event->data);
    free(event);
}
int by_address(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* ---- memory ---- */

int find_at(const void *table, size_t count, size_t stride, uint64_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (*(const uint64_t *)((const char *)table + middle * stride) <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return (int)low - 1;
}

Region *region_at(const Worker *w, uint64_t address)
{
    int i = find_at(w->regions, w->region_count, sizeof *w->regions, address);
    if (i < 0 || address - w->regions[i].address >= w->regions[i].nbytes)
        return NULL;
    return &w->regions[i];
}

int64_t worker_register(Worker *w, uint64_t address, uint64_t nbytes, void **key, size_t *key_bytes, char *error)
{
    for (size_t i = 0; i < w->region_count; i++) {
        const Region *other = &w->regions[i];
        if (address < other->address + other->nbytes && other->address < address + nbytes) {
            snprintf(error, TEXT_BYTES, "this memory overlaps a region that is registered already");
            return -1;
        }
    }
    Region *grown = realloc(w->regions, (w->region_count + 1) * sizeof *grown);
    if (grown == NULL)
        return fail(w, error, "register", UCS_ERR_NO_MEMORY);
    w->regions = grown;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = (void *)(uintptr_t)address,
        .length = nbytes,
    };
    Region region = {.address = address, .nbytes = nbytes, .id = ++w->last_id};
    ucs_status_t status = w->ucx.ucp_mem_map(w->context, &params, &region.memory);
    if (status != UCS_OK)
        return fail(w, error, "register memory", status);
    status = w->ucx.ucp_rkey_pack(w->context, region.memory, key, key_bytes);
    if (status != UCS_OK) {
        w->ucx.ucp_mem_unmap(w->context, region.memory);
        return fail(w, error, "pack the memory key", status);
    }
    w->regions[w->region_count++] = region;
    qsort(w->regions, w->region_count, sizeof *w->regions, by_address);
    return region.id;
}

int worker_address(Worker *w, ucp_address_t **address, size_t *nbytes, char *error)
{
    ucs_status_t status = w->ucx.ucp_worker_get_address(w->worker, address, nbytes);
    return status == UCS_OK ? 0 : fail(w, error, "worker address", status);
}
/* ---- waiting ---- */

void worker_wake(Worker *w)
{
    atomic_store(&w->woken, 1);
    uint64_t one = 1;
    ssize_t written = write(w->wake_fd, &one, sizeof one);
    (void)written; /* full means that a wake is pending already */
}

static double next_deadline(const Worker *w, double end)
{
    bool busy = false;
    for (const Batch *batch = w->batches; batch != NULL; batch = batch->next) {
        busy = true;
        if (!batch->over && batch->deadline < end)
            end = batch->deadline;
    }
    for (const Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        busy = busy || peer->closed || !peer_idle(peer);
        if (!peer->ready && !peer->lost && peer->connect_deadline < end)
            end = peer->connect_deadline;
    }
    double longest = now_s() + (busy ? SLEEP_BUSY_S : SLEEP_IDLE_S);
    return end < longest ? end : longest;
}

/* Returns false when a Unix signal came. */
static bool sleep_until(Worker *w, double end)
{
    double left = end - now_s();
    if (left <= 0)
        return true;
    struct pollfd fds[2] = {{.fd = w->ucx_fd, .events = POLLIN}, {.fd = w->wake_fd, .events = POLLIN}};
    struct timespec timeout = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - floor(left)) * 1e9)};
    int ready = ppoll(fds, 2, &timeout, NULL);
    if (ready < 0)
        return errno != EINTR;
    uint64_t count;
    if (fds[1].revents != 0 && read(w->wake_fd, &count, sizeof count) < 0)
        return errno == EAGAIN;
    return true;
}

/* All progress of UCX is made here. */
static unsigned progress(Worker *w)
{
    return network_replaced(w) ? 0 : w->ucx.ucp_worker_progress(w->worker);
}

int worker_poll(Worker *w, double timeout_s, char *error)
{
    double end = now_s() + timeout_s;
    for (;;) {
        unsigned progressed = progress(w);
        if (w->replaced) {
            snprintf(error, TEXT_BYTES,
                     "a network interface in use was replaced, and UCX keeps to the former one; restart this worker");
            return -1;
        }
        bool more = advance_all(w);
        if (atomic_exchange(&w->woken, 0) || w->first_event != NULL)
            return 0;
        if (now_s() >= end)
            return 0;
        if (progressed != 0 || more || w->ucx.ucp_worker_arm(w->worker) == UCS_ERR_BUSY)
            continue;
        if (!sleep_until(w, next_deadline(w, end)))
            return 0;
    }
}

/* Progress without the descriptor, for ends of operations that it may not announce. */
static void spin_once(Worker *w)
{
    if (progress(w) == 0 && !advance_all(w)) {
        struct timespec pause = {.tv_nsec = 50000};
        nanosleep(&pause, NULL);
    }
}
/* ---- fences and the end ---- */

void close_endpoint(Worker *w, ucp_ep_h *endpoint, unsigned flags, double end)
{
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = flags};
    ucs_status_ptr_t request = w->ucx.ucp_ep_close_nbx(*endpoint, &params);
    *endpoint = NULL;
    if (!UCS_PTR_IS_PTR(request))
        return;
    while (w->ucx.ucp_request_check_status(request) == UCS_INPROGRESS && now_s() < end)
        spin_once(w);
    w->ucx.ucp_request_free(request);
}

typedef struct {
    Worker *worker;
    bool done, abandoned;
} FlushWait;

static void on_flushed(void *request, ucs_status_t status, void *argument)
{
    (void)status;
    FlushWait *wait = argument;
    wait->done = true;
    wait->worker->ucx.ucp_request_free(request);
    if (wait->abandoned)
        free(wait);
}

/* UCX takes an endpoint's lanes down after its close has returned, and a worker flush waits for that. It waits for
 * other peers as well, one of which may hang, hence flush_end. */
static void settle(Worker *w, double settle_end, double flush_end)
{
    FlushWait *wait = calloc(1, sizeof *wait);
    if (wait != NULL) {
        wait->worker = w;
        ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                      .cb = {.send = on_flushed},
                                      .user_data = wait};
        ucs_status_ptr_t request = w->ucx.ucp_worker_flush_nbx(w->worker, &params);
        if (!UCS_PTR_IS_PTR(request))
            wait->done = true;
        while (!wait->done && now_s() < flush_end)
            spin_once(w);
        if (wait->done)
            free(wait);
        else
            wait->abandoned = true;
    }
    while (now_s() < settle_end)
        spin_once(w);
}

int worker_fence(Worker *w, int64_t id, double limit_s, double settle_s, int64_t **left, size_t *left_count,
                 char *error)
{
    Peer *peer = worker_peer(w, id);
    if (peer == NULL) {
        snprintf(error, TEXT_BYTES, "no such peer");
        return -1;
    }
    double end = now_s() + limit_s;
    if (!peer->lost) {
        say_bye(w, peer);
        peer->lost = true; /* no event: who fences knows */
        peer->status = UCS_ERR_CANCELED;
    }
    peer_batches_failed(w, peer, FAILED_FENCED, "given up");
    while (!peer->direct && peer->operation_count > 0)
        op_end(peer->operations.next); /* on_data finds them no more */
    close_endpoint(w, &peer->endpoint, UCP_EP_CLOSE_FLAG_FORCE, end);
    while (!peer_idle(peer) && now_s() < end)
        spin_once(w);
    double start = now_s();
    settle(w, start + settle_s, start + 4 * settle_s);
    *left = calloc(2 * peer->operation_count + 1, sizeof **left);
    *left_count = 0;
    for (Op *op = peer->operations.next; op != &peer->operations && *left != NULL; op = op->next) {
        (*left)[2 * *left_count] = (int64_t)op->address;
        (*left)[2 * (*left_count)++ + 1] = (int64_t)op->nbytes;
    }
    peer->closed = true;
    advance_all(w);
    return *left == NULL ? fail(w, error, "fence", UCS_ERR_NO_MEMORY) : 0;
}

static void free_all(Worker *w)
{
    while (w->batches != NULL) {
        Batch *batch = w->batches;
        w->batches = batch->next;
        free(batch->rows);
        free(batch);
    }
    while (w->peers != NULL) {
        Peer *peer = w->peers;
        w->peers = peer->next;
        free(peer->keys);
        free(peer);
    }
    for (Event *event = worker_take_events(w), *next; event != NULL; event = next) {
        next = event->next;
        event_free(event);
    }
    serve_free(w);
    network_close(w);
    free(w->regions);
    free(w->name);
    w->regions = NULL;
    w->name = NULL;
    w->region_count = 0;
}

void worker_close(Worker *w, double limit_s)
{
    if (!w->open)
        return;
    w->open = false;
    if (network_replaced(w)) {
        close(w->wake_fd);
        free_all(w);
        return;
    }
    double end = now_s() + limit_s;
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        peer_batches_failed(w, peer, FAILED_FENCED, "the transport is closed");
        while (!peer->direct && peer->operation_count > 0)
            op_end(peer->operations.next);
        bool graceful = !peer->lost && !peer->closed && peer->ready && peer->operation_count == 0;
        if (graceful)
            say_bye(w, peer);
        peer->lost = true;
        if (peer->endpoint != NULL)
            close_endpoint(w, &peer->endpoint, graceful ? 0 : UCP_EP_CLOSE_FLAG_FORCE, end);
    }
    serve_close(w, end);
    bool idle = false;
    while (!idle && now_s() < end) {
        spin_once(w);
        idle = serve_idle(w);
        for (Peer *peer = w->peers; peer != NULL; peer = peer->next)
            idle = idle && peer_idle(peer);
    }
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        for (size_t i = 0; i < peer->key_count; i++)
            w->ucx.ucp_rkey_destroy(peer->keys[i].key);
        peer->key_count = 0;
    }
    w->ucx.ucp_worker_destroy(w->worker);
    for (size_t i = 0; i < w->region_count; i++)
        w->ucx.ucp_mem_unmap(w->context, w->regions[i].memory);
    w->ucx.ucp_cleanup(w->context);
    close(w->wake_fd);
    free_all(w);
}
/* ---- the start ---- */

/* settings: triples of name, value and kind. A "default" gives way to the environment, and UCX may lack it. */
static int read_config(Worker *w, const char *const *settings, size_t count, ucp_config_t **config, char *error)
{
    ucs_status_t status = w->ucx.ucp_config_read(NULL, NULL, config);
    if (status != UCS_OK)
        return fail(w, error, "UCX settings", status);
    for (size_t i = 0; i < count; i++) {
        const char *name = settings[3 * i], *value = settings[3 * i + 1];
        bool is_default = strcmp(settings[3 * i + 2], "default") == 0;
        char variable[128];
        snprintf(variable, sizeof variable, "UCX_%s", name);
        if (is_default && getenv(variable) != NULL)
            continue;
        status = w->ucx.ucp_config_modify(*config, name, value);
        if (status != UCS_OK && !is_default) {
            w->ucx.ucp_config_release(*config);
            snprintf(error, TEXT_BYTES, "UCX setting %s=%s: %s", name, value, w->ucx.ucs_status_string(status));
            return -1;
        }
    }
    return 0;
}

ucs_status_t set_handler(Worker *w, unsigned id, ucp_am_recv_callback_t callback)
{
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = callback,
        .arg = w,
    };
    return w->ucx.ucp_worker_set_am_recv_handler(w->worker, &handler);
}

static int open_worker(Worker *w, char *error)
{
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = w->ucx.ucp_worker_create(w->context, &params, &w->worker);
    if (status != UCS_OK)
        return fail(w, error, "UCX worker", status);
    status = peer_set_handlers(w);
    if (status == UCS_OK)
        status = transfer_set_handlers(w);
    if (status == UCS_OK)
        status = serve_set_handlers(w);
    if (status == UCS_OK)
        status = w->ucx.ucp_worker_get_efd(w->worker, &w->ucx_fd);
    if (status == UCS_OK) {
        w->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (w->wake_fd >= 0)
            return 0;
        status = UCS_ERR_NO_RESOURCE;
    }
    w->ucx.ucp_worker_destroy(w->worker);
    return fail(w, error, "UCX wake-up descriptor", status);
}

int worker_open(Worker *w, const char *library, const char *name, size_t name_bytes, size_t window, bool direct,
                const char *const *settings, size_t setting_count, char *error)
{
    memset(w, 0, sizeof *w);
    if (ucx_library_load(&w->ucx, library, error, TEXT_BYTES) != 0)
        return -1;
    ucp_config_t *config;
    if (read_config(w, settings, setting_count, &config, error) != 0)
        return -1;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
    };
    /* The oldest interface that has all of this, since a newer one makes an older library complain. */
    ucs_status_t status = w->ucx.ucp_init_version(1, 13, &params, config, &w->context);
    w->ucx.ucp_config_release(config);
    if (status != UCS_OK)
        return fail(w, error, "UCX start", status);
    w->name = malloc(name_bytes + 1);
    if (w->name == NULL || open_worker(w, error) != 0) {
        free(w->name);
        w->ucx.ucp_cleanup(w->context);
        return -1;
    }
    memcpy(w->name, name, name_bytes);
    network_open(w);
    w->name_bytes = name_bytes;
    w->window = window;
    w->direct = direct;
    w->open = true;
    return 0;
}
