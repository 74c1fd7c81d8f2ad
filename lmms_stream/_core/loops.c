/* The extension module lmms_stream._core.loops: its functions, and nothing else. */

#include "core.h"

#define ENTRY_POINTS(ENTRY) \
    ENTRY(best_fit) ENTRY(even_fit) ENTRY(pack_epochs) ENTRY(shuffle) ENTRY(take_turns) ENTRY(take_epochs) ENTRY(compare) ENTRY(deal) ENTRY(deal_both) ENTRY(fill) ENTRY(first_fit) \
    ENTRY(next_fit) ENTRY(resize_height) ENTRY(resize_width) ENTRY(settle) ENTRY(sketch) ENTRY(to_patches) \
    ENTRY(use_needed_last) ENTRY(wait) ENTRY(window_fit)

#define DECLARED(name) PyObject *py_##name(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL},

ENTRY_POINTS(DECLARED)

static PyMethodDef methods[] = {ENTRY_POINTS(METHOD){NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "loops", "Loops over numbers; see the C files.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_loops(void) { return PyModuleDef_Init(&definition); }
