/* The source's side of reads by message: connects back to readers and answers their READs from registered memory. */
#include "_ucx_worker.h"

#include <stdlib.h>
#include <string.h>

enum {
    DATA_BYTES = 8000, /* fits one tcp segment as UCX cuts them, so that the reader copies it once */
    SENDING_PER_READER = 32,
    MESSAGES_PER_TURN = 256,
    QUEUED_PER_READER = 1 << 16, /* readers ask for far less at a time */
};

typedef struct Answer {
    Read read;
    uint64_t offset;
    struct Answer *next;
} Answer;

struct Reader {
    Worker *worker;
    uint64_t nonce;
    char *name;
    size_t name_bytes;
    ucp_ep_h endpoint;
    Answer *first, *last;
    size_t queued, sending;
    bool lost;
    Reader *next;
};

/* A HELLO that came in a callback, in which no endpoint can be made. */
struct Greeting {
    uint64_t nonce;
    size_t name_bytes, address_bytes;
    Greeting *next;
    char bytes[];
};

static void on_reader_error(void *argument, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint, (void)status;
    ((Reader *)argument)->lost = true;
}

static Reader *reader_by_nonce(const Worker *w, uint64_t nonce)
{
    for (Reader *reader = w->readers; reader != NULL; reader = reader->next)
        if (reader->nonce == nonce && !reader->lost)
            return reader;
    return NULL;
}

static void drop_answers(Reader *reader)
{
    while (reader->first != NULL) {
        Answer *answer = reader->first;
        reader->first = answer->next;
        free(answer);
    }
    reader->last = NULL;
    reader->queued = 0;
}

static void reader_free(Reader *reader)
{
    drop_answers(reader);
    free(reader->name);
    free(reader);
}

static ucs_status_t on_hello(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                             const ucp_am_recv_param_t *param)
{
    Worker *w = argument;
    uint32_t name_bytes;
    Hello hello;
    if (header_bytes != sizeof hello || nbytes < sizeof name_bytes || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV))
        return UCS_OK;
    memcpy(&hello, header, sizeof hello);
    memcpy(&name_bytes, data, sizeof name_bytes);
    nbytes -= sizeof name_bytes;
    if (nbytes < name_bytes)
        return UCS_OK;
    Greeting *greeting = malloc(sizeof *greeting + nbytes);
    if (greeting == NULL)
        return UCS_OK;
    *greeting = (Greeting){hello.nonce, name_bytes, nbytes - name_bytes, w->greetings};
    memcpy(greeting->bytes, (char *)data + sizeof name_bytes, nbytes);
    w->greetings = greeting;
    return UCS_OK;
}

static ucs_status_t on_read(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                            const ucp_am_recv_param_t *param)
{
    (void)data, (void)nbytes, (void)param;
    Worker *w = argument;
    Read read;
    if (header_bytes != sizeof read)
        return UCS_OK;
    memcpy(&read, header, sizeof read);
    Reader *reader = reader_by_nonce(w, read.nonce);
    if (reader == NULL || reader->queued >= QUEUED_PER_READER)
        return UCS_OK;
    Answer *answer = malloc(sizeof *answer);
    if (answer == NULL)
        return UCS_OK;
    *answer = (Answer){.read = read};
    if (reader->last != NULL)
        reader->last->next = answer;
    else
        reader->first = answer;
    reader->last = answer;
    reader->queued++;
    return UCS_OK;
}

ucs_status_t serve_set_handlers(Worker *w)
{
    ucs_status_t status = set_handler(w, AM_HELLO, on_hello);
    return status == UCS_OK ? set_handler(w, AM_READ, on_read) : status;
}

/* A reader that greets again has given its former connection up. */
static void replace_readers(Worker *w, const Greeting *greeting)
{
    for (Reader *reader = w->readers; reader != NULL; reader = reader->next)
        if (reader->name_bytes == greeting->name_bytes &&
            memcmp(reader->name, greeting->bytes, greeting->name_bytes) == 0)
            reader->lost = true;
}

static void welcome(Worker *w, const Greeting *greeting)
{
    char error[TEXT_BYTES];
    replace_readers(w, greeting);
    Reader *reader = calloc(1, sizeof *reader);
    if (reader == NULL || (reader->name = malloc(greeting->name_bytes + 1)) == NULL) {
        free(reader);
        return;
    }
    memcpy(reader->name, greeting->bytes, greeting->name_bytes);
    reader->name_bytes = greeting->name_bytes;
    reader->worker = w;
    reader->nonce = greeting->nonce;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)(greeting->bytes + greeting->name_bytes),
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_reader_error, .arg = reader},
    };
    if (w->ucx.ucp_ep_create(w->worker, &params, &reader->endpoint) != UCS_OK) {
        reader_free(reader); /* it learns of it from its deadline */
        return;
    }
    network_used(w, reader->endpoint);
    reader->next = w->readers;
    w->readers = reader;
    Hello hello = {reader->nonce};
    if (message_send(w, reader->endpoint, AM_WELCOME, &hello, sizeof hello, NULL, 0, NULL, &reader->sending, error) !=
        0)
        reader->lost = true;
}

/* Sends the next piece of the first answer. */
static void answer_next(Worker *w, Reader *reader)
{
    char error[TEXT_BYTES];
    Answer *answer = reader->first;
    const Read *read = &answer->read;
    Data data = {read->nonce, read->operation, answer->offset};
    const Region *region = region_at(w, read->address);
    uint64_t nbytes = read->nbytes - answer->offset;
    if (nbytes > DATA_BYTES)
        nbytes = DATA_BYTES;
    bool inside = region != NULL && read->nbytes <= region->address + region->nbytes - read->address;
    if (!inside) {
        data.offset = REFUSED;
        nbytes = 0;
    }
    const void *payload = (const void *)(uintptr_t)(read->address + answer->offset);
    if (message_send(w, reader->endpoint, AM_DATA, &data, sizeof data, inside ? payload : NULL, nbytes,
                     inside ? region->memory : NULL, &reader->sending, error) != 0) {
        reader->lost = true;
        return;
    }
    answer->offset += nbytes;
    if (inside && answer->offset < read->nbytes)
        return;
    reader->first = answer->next;
    if (reader->first == NULL)
        reader->last = NULL;
    reader->queued--;
    free(answer);
}

bool serve_advance(Worker *w)
{
    bool more = false;
    if (!w->open)
        return false; /* serve_close walks the readers */
    while (w->greetings != NULL) {
        Greeting *greeting = w->greetings;
        w->greetings = greeting->next;
        welcome(w, greeting);
        free(greeting);
        more = true;
    }
    for (Reader *reader = w->readers; reader != NULL; reader = reader->next) {
        int sent = 0;
        while (!reader->lost && reader->first != NULL && reader->sending < SENDING_PER_READER &&
               sent < MESSAGES_PER_TURN) {
            answer_next(w, reader);
            sent++;
        }
        more = more || sent == MESSAGES_PER_TURN;
    }
    for (Reader **at = &w->readers; *at != NULL;) {
        Reader *reader = *at;
        if (reader->lost && reader->endpoint != NULL) {
            drop_answers(reader);
            ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
            ucs_status_ptr_t request = w->ucx.ucp_ep_close_nbx(reader->endpoint, &params);
            if (UCS_PTR_IS_PTR(request))
                w->ucx.ucp_request_free(request);
            reader->endpoint = NULL;
        }
        if (reader->endpoint == NULL && reader->sending == 0) {
            *at = reader->next;
            reader_free(reader);
        } else {
            at = &reader->next;
        }
    }
    return more;
}

bool serve_idle(const Worker *w)
{
    for (const Reader *reader = w->readers; reader != NULL; reader = reader->next)
        if (reader->sending > 0)
            return false;
    return true;
}

void serve_bye(Worker *w, uint64_t nonce)
{
    Reader *reader = reader_by_nonce(w, nonce);
    if (reader != NULL)
        reader->lost = true;
}

void serve_close(Worker *w, double end)
{
    char error[TEXT_BYTES];
    for (Reader *reader = w->readers; reader != NULL; reader = reader->next) {
        drop_answers(reader);
        if (reader->endpoint == NULL)
            continue;
        Hello bye = {reader->nonce};
        if (!reader->lost)
            message_send(w, reader->endpoint, AM_BYE, &bye, sizeof bye, NULL, 0, NULL, &reader->sending, error);
        close_endpoint(w, &reader->endpoint, reader->lost ? UCP_EP_CLOSE_FLAG_FORCE : 0, end);
    }
}

void serve_free(Worker *w)
{
    while (w->readers != NULL) {
        Reader *reader = w->readers;
        w->readers = reader->next;
        reader_free(reader);
    }
    while (w->greetings != NULL) {
        Greeting *greeting = w->greetings;
        w->greetings = greeting->next;
        free(greeting);
    }
}
