/* Arguments of the entry points: numbers, and arrays by the buffer protocol. Memory of a call. */

#include "core.h"
#include <stdarg.h>

/* Codes of arrays, in small letters; a capital is an array to write. */
static const struct {
    char code;
    const char *formats;
    Py_ssize_t size;
    const char *dtype;
} KINDS[] = {
    {'b', "B", 1, "uint8"},   {'t', "?", 1, "bool"},    {'h', "H", 2, "uint16"},  {'i', "il", 4, "int32"},
    {'w', "IL", 4, "uint32"}, {'l', "lq", 8, "int64"},  {'u', "LQ", 8, "uint64"}, {'f', "f", 4, "float32"},
    {'d', "d", 8, "float64"},
};
#define NUM_KINDS ((int)(sizeof(KINDS) / sizeof(KINDS[0])))

static bool read_array(Call *call, PyObject *argument, char code, Py_ssize_t number, Array *array) {
    bool is_written = code >= 'A' && code <= 'Z';
    int kind = 0;
    while (KINDS[kind].code != (is_written ? code - 'A' + 'a' : code)) kind++;
    Py_buffer *view = &call->views[call->num_views];
    if (PyObject_GetBuffer(argument, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0)))
        return false;
    call->num_views++;
    const char *format = view->format ? view->format : "B";
    if (view->itemsize != KINDS[kind].size || strlen(format) != 1 || !strchr(KINDS[kind].formats, format[0])) {
        PyErr_Format(
            PyExc_TypeError, "argument %zd of %s has values of the format '%s': pass an array of %s", number + 1,
            call->name, format, KINDS[kind].dtype
        );
        return false;
    }
    array->data = view->buf;
    array->count = view->len / view->itemsize;
    return true;
}

static bool read_number(PyObject *argument, char code, void *target) {
    if (code == 'x') {
        *(double *)target = PyFloat_AsDouble(argument);
    } else {
        PyObject *index = PyNumber_Index(argument);
        if (!index) return false;
        if (code == 'n')
            *(int64_t *)target = PyLong_AsLongLong(index);
        else
            *(uint64_t *)target = PyLong_AsUnsignedLongLong(index);
        Py_DECREF(index);
    }
    return !PyErr_Occurred();
}

/* Read the arguments of an entry point. codes: an Array of a kind each (see KINDS), n: int64_t, q: uint64_t, x: double.
   Whatever the result, end_call comes afterwards. */
bool begin_call(Call *call, const char *name, PyObject *const *args, Py_ssize_t num_args, const char *codes, ...) {
    call->name = name;
    call->num_views = call->num_blocks = 0;
    call->is_short = false;
    if (num_args != (Py_ssize_t)strlen(codes)) {
        PyErr_Format(PyExc_TypeError, "%s takes %zu arguments, got %zd", name, strlen(codes), num_args);
        return false;
    }
    va_list targets;
    va_start(targets, codes);
    bool is_right = true;
    for (Py_ssize_t at = 0; is_right && at < num_args; at++) {
        void *target = va_arg(targets, void *);
        is_right = strchr("nqx", codes[at]) ? read_number(args[at], codes[at], target)
                                            : read_array(call, args[at], codes[at], at, target);
    }
    va_end(targets);
    return is_right;
}

/* Free what a call holds; return the result, or NULL with an error set. */
PyObject *end_call(Call *call, PyObject *result) {
    for (int at = 0; at < call->num_blocks; at++) free(call->blocks[at]);
    for (int at = 0; at < call->num_views; at++) PyBuffer_Release(&call->views[at]);
    if (!call->is_short) return result;
    Py_XDECREF(result);
    return PyErr_NoMemory();
}

bool check(const Call *call, bool is_right, const char *rule) {
    if (!is_right) PyErr_Format(PyExc_ValueError, "%s: %s", call->name, rule);
    return is_right;
}

bool in_range(const int64_t *values, int64_t count, int64_t least, int64_t stop) {
    bool is_inside = true;
    for (int64_t at = 0; at < count; at++) is_inside &= values[at] >= least && values[at] < stop;
    return is_inside;
}

/* Return whether values never fall, from `first` on and to `most` at the most. */
bool ascends(const int64_t *values, int64_t count, int64_t first, int64_t most) {
    for (int64_t at = 0; at < count; at++) {
        if (values[at] < first) return false;
        first = values[at];
    }
    return first <= most;
}

/* Return zeros that end_call frees; without memory, set call->is_short, and return NULL. Needs no interpreter's lock. */
void *zeros(Call *call, int64_t count, size_t size) {
    void *block = calloc((size_t)MAX(count, 1), size);
    if (block)
        call->blocks[call->num_blocks++] = block;
    else
        call->is_short = true;
    return block;
}
