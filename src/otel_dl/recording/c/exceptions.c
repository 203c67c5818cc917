/* Exceptions: taken, put back, told apart. */

#include "native.h"

/* Takes the exception that is set, as one object whose traceback is its own. */
PyObject *
take_exception(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

void
put_exception(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyObject *type = (PyObject *)Py_TYPE(error);
    Py_INCREF(type);
    PyErr_Restore(type, error, PyException_GetTraceback(error));
#endif
}

/* An attribute could not be had: whether it is just missing, which is cleared. What a signal handler raised meanwhile
 * stays, and is the caller's. */
int
no_attribute(void)
{
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return 0;
    PyErr_Clear();
    return 1;
}
