"""moto's server with a clock that can be put forward: a line says by how many seconds, or what the store ignores from then on.

What S3 decides at once, moto's threads decide one after another here. And as S3 does, it answers that there is no such upload.
"""

import datetime
import os
import sys
import threading

import moto.s3.models
import moto.s3.responses
from moto.s3.exceptions import NoSuchUpload
from moto.server import main
from werkzeug.datastructures import Headers

ahead = datetime.timedelta()
ignored = set()
now = moto.s3.models.utcnow
deciding = threading.RLock()
put_object = moto.s3.responses.S3Response.put_object
complete_multipart_upload = moto.s3.models.S3Backend.complete_multipart_upload
abort_multipart_upload = moto.s3.models.S3Backend.abort_multipart_upload


def obey():
    global ahead
    for line in sys.stdin:
        word = line.strip()
        if word.isdigit():
            ahead += datetime.timedelta(seconds=int(word))
        else:
            ignored.add(word)
        print("done", flush=True)
    os._exit(0)


def put_object_or_ignore(self):
    if "If-Match" in ignored:
        self.headers = Headers([header for header in self.headers if header[0] != "If-Match"])
    with deciding:
        return put_object(self)


def complete_or_refuse(self, bucket_name, multipart_id, body):
    with deciding:
        if multipart_id not in self.get_bucket(bucket_name).multiparts:
            raise NoSuchUpload(upload_id=multipart_id)
        return complete_multipart_upload(self, bucket_name, multipart_id, body)


def abort_or_ignore(self, *args, **kwargs):
    with deciding:
        if "abort" not in ignored:
            abort_multipart_upload(self, *args, **kwargs)


moto.s3.models.utcnow = lambda: now() + ahead
moto.s3.responses.S3Response.put_object = put_object_or_ignore
moto.s3.models.S3Backend.complete_multipart_upload = complete_or_refuse
moto.s3.models.S3Backend.abort_multipart_upload = abort_or_ignore
threading.Thread(target=obey, daemon=True).start()
main()
