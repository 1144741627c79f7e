"""Pages of jobs: the queue, one job with what it prints, stopping, moving and asking again."""

import re

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.web.jobs import Job
from powertrain.web.site import fields, shown, site_of

STUDY = re.compile(r"\bstudies/(\w[\w.-]*\w)")            # as commands that measure print where they keep it
TAIL_BYTES = 60_000          # of a job's output that its page shows


def queue(request: Request) -> Response:
    jobs = site_of(request).jobs.all()
    return shown(request, "jobs.html", title="Jobs", all_jobs=[(job, outcome(job), tone(job)) for job in jobs])


def one(request: Request) -> Response:
    """Show a job. With ?fragment, only the part that changes."""
    site = site_of(request)
    job = site.jobs.get(request.path_params["id"])
    output = site.jobs.output(job, TAIL_BYTES)
    study = next((name for name in reversed(STUDY.findall(output))
                  if (site.places.studies / name / "evidence.json").is_file()), "")
    return shown(request, "job.html", title=job.title, job=job, output=output, says=outcome(job), tone=tone(job), study=study,
                 has_run=bool(job.run) and (site.places.root / job.run / "recipe.yaml").is_file(),
                 has_model=bool(job.run) and (site.places.root / job.run / "model").is_dir())


def outcome(job: Job) -> str:
    """Return how a job stands, as the rest of a sentence that begins with the job."""
    if job.state != "ended":
        return {"waiting": "waits for its turn", "running": "runs"}[job.state]
    if not job.began:
        return "was taken out of the queue before it began"
    if job.code is None:
        return "ended while no page looked; its output says how"
    if job.code < 0:
        return "was ended at once; nothing after its last save is kept" if job.words[0] == "train" else "was ended at once"
    return {0: "is done", 3: "has trained, but not all is saved", 4: "is done and has findings",
            5: "is done and has critical findings", 75: "has stopped and saved", 130: "has stopped"}.get(
        job.code, "has failed; the end of its output says why")


def tone(job: Job) -> str:
    return "open" if job.state != "ended" else "good" if job.code in (0, 4, 5, 75) else "bad"


async def stop(request: Request) -> Response:
    """Take a job out of the queue, let it end well, or end it at once."""
    how = (await fields(request)).get("how")
    if how not in ("well", "now"):
        raise WrongUse("a job is stopped `well` or `now`")
    jobs = site_of(request).jobs
    jobs.stop(request.path_params["id"], now=how == "now")
    return JSONResponse({"refresh": True})


async def move(request: Request) -> Response:
    where = (await fields(request)).get("where")
    if where not in ("up", "down"):
        raise WrongUse("a job is moved `up` or `down`")
    site_of(request).jobs.move(request.path_params["id"], up=where == "up")
    return JSONResponse({"refresh": True})


ROUTES = [Route("/jobs", queue), Route("/jobs/{id}", one), Route("/jobs/{id}/stop", stop, methods=["POST"]),
          Route("/jobs/{id}/move", move, methods=["POST"])]
